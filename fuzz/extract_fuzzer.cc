// Fuzzes the C++ core of the HLO extractor with libFuzzer; run.sh builds and runs it.
//
// Whatever the bytes are, nothing may be read or written out of bounds, leak, be undefined, or take memory out of
// proportion to the input, and what is written must be in range.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../tpu_graphs/hlo/cc/document.h"

namespace {

using tpu_graphs::Bytes;

#define CHECK(condition)       \
  do {                         \
    if (!(condition)) abort(); \
  } while (false)

const tpu_graphs::OpcodeTable& Opcodes() {
  static const tpu_graphs::OpcodeTable table(
      {{"add", 2}, {"parameter", 63}, {"constant", 24}, {"fusion", 45}, {"while", 94}, {"convolution", 26}, {"dot", 34}});
  return table;
}

void CheckGraph(const tpu_graphs::Tuning& tuning, int64_t layout_padding) {
  const int64_t n = tuning.num_ops;
  std::vector<uint8_t> opcode(n);
  std::vector<float> feat(n * tpu_graphs::kNumNodeFeatures);
  tpu_graphs::GraphParts parts;
  const auto fault = tuning.Graph(Opcodes(), layout_padding, opcode.data(), feat.data(), &parts);
  CHECK(parts.computation_sizes.size() == parts.ends_segment.size());
  CHECK(std::accumulate(parts.computation_sizes.begin(), parts.computation_sizes.end(), int64_t{0}) == n);
  if (fault) {
    CHECK(fault->index >= 0 && fault->index < n);
    tuning.Find(fault->index);
    return;
  }
  CHECK(parts.edges.size() % 2 == 0);
  for (size_t i = 0; i < parts.edges.size(); ++i) CHECK(parts.edges[i] >= 0 && parts.edges[i] < n);
  for (size_t i = 2; i < parts.edges.size(); i += 2) {
    CHECK(std::make_pair(parts.edges[i - 2], parts.edges[i - 1]) <= std::make_pair(parts.edges[i], parts.edges[i + 1]));
  }
  int64_t unknown = 0;
  for (const auto& [name, count] : parts.unknown_opcodes) unknown += count;
  int64_t zeros = 0;
  for (const uint8_t id : opcode) zeros += id == 0;
  CHECK(unknown == zeros);
}

void CheckTuning(const tpu_graphs::Tuning& tuning) {
  CHECK(tuning.runs.messages.size() == tuning.runs.time.size());
  CHECK(tuning.runs.messages.size() == tuning.runs.flags.size());
  CheckGraph(tuning, 0);
  CheckGraph(tuning, -1);
  std::vector<int64_t> positions(tuning.runs.messages.size());
  std::iota(positions.begin(), positions.end(), 0);
  std::vector<float> tile(positions.size() * tpu_graphs::kNumTileFeatures);
  tuning.TileConfigs(positions, tile.data());
  for (const int64_t position : positions) {  // One by one, since the first fault ends a call.
    std::vector<int8_t> layout(tuning.config_nodes.size() * tpu_graphs::kNumLayoutFeatures);
    tuning.LayoutConfigs({position}, layout.data());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Bytes bytes(reinterpret_cast<const char*>(data), size);
  for (const auto type : {tpu_graphs::FileType::kTuningData, tpu_graphs::FileType::kModuleTuningData,
                          tpu_graphs::FileType::kHloProto, tpu_graphs::FileType::kHloModuleProto}) {
    const auto document = tpu_graphs::Document::Parse(bytes, type, Opcodes());
    if (!document) continue;
    for (const Bytes name : document->Names()) CHECK(!name.empty() && tpu_graphs::IsUtf8(name));
    for (size_t i = 0; i < document->num_tunings(); ++i) CheckTuning(document->TuningAt(i));
  }
  return 0;
}
