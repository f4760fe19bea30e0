// A file of HLO modules, with or without measured runs: its content and its arrays.
//
// ../protos.py lists the messages. A file is read twice: once to check all of it and to count, and once to write the
// arrays, so that the arrays are allocated in their final size and nothing is copied. The objects here hold only views
// into the bytes of the file, which must outlive them.

#ifndef TPU_GRAPHS_HLO_CC_DOCUMENT_H_
#define TPU_GRAPHS_HLO_CC_DOCUMENT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "wire.h"

namespace tpu_graphs {

constexpr int kNumNodeFeatures = 140;
constexpr int kNumTileFeatures = 24;
constexpr int kLayoutTensors = 3;
constexpr int kLayoutDimensions = 6;
constexpr int kNumLayoutFeatures = kLayoutTensors * kLayoutDimensions;

// Opcode name -> id.
class OpcodeTable {
 public:
  explicit OpcodeTable(std::vector<std::pair<std::string, uint8_t>> names);
  OpcodeTable(const OpcodeTable&) = delete;
  OpcodeTable& operator=(const OpcodeTable&) = delete;

  // Returns 0 for a name that is not in the table.
  uint8_t Find(Bytes name) const;

 private:
  static constexpr size_t kSlots = 1024;  // A power of two, several times the number of opcodes.

  std::vector<std::pair<std::string, uint8_t>> names_;
  std::array<uint8_t, kSlots> slots_{};  // Position in `names_` + 1; 0 is empty.
};

// `_FILE_TYPES` in ../native.py has the same order.
enum class FileType { kTuningData, kModuleTuningData, kHloProto, kHloModuleProto };

// A broken rule, the place and the value that breaks it. `Rule` in ../graph.py has the same numbers.
struct Fault {
  enum Kind { kUnknownOperand, kUnknownComputation, kMissingRoot, kSelfReference, kNodeCount, kTensorCount, kDimension };

  Kind kind;
  int64_t index;  // Index of the instruction or, for faults of a config, of the run.
  int64_t node;   // Index of the node of the config; 0 for faults of an instruction.
  int64_t value;  // The id, count or dimension that breaks the rule.
};

// An instruction: the name of its computation, its own name and its id.
struct Place {
  Bytes computation;
  Bytes instruction;
  int64_t id;
};

// The runs of a module; each list has one entry per run.
struct Runs {
  enum Flag : uint8_t { kError = 1, kProfile = 2, kTileConfig = 4, kModuleConfig = 8, kDefault = 16 };

  std::vector<Bytes> messages;
  std::vector<uint8_t> flags;
  std::vector<int64_t> time;  // In ns.
};

// The parts of a graph whose sizes are known only after the messages have been read.
struct GraphParts {
  std::vector<int64_t> computation_sizes;  // Number of instructions of each computation.
  std::vector<uint8_t> ends_segment;       // 1 for each computation that ends a segment, else 0.
  std::vector<int64_t> edges;              // Pairs (consumer, operand), sorted.
  std::vector<std::pair<Bytes, int64_t>> unknown_opcodes;  // Name, number of ops; sorted by name.
};

// One module with its runs.
class Tuning {
 public:
  bool has_module = false;
  Bytes name;
  uint64_t fingerprint = 0;
  int64_t num_ops = 0;
  std::vector<Bytes> module;  // One entry per message; protobuf merges a message that occurs more than once.
  Runs runs;
  std::vector<uint64_t> config_nodes;

  // Writes the arrays `opcode`, [num_ops], and `feat`, [num_ops, kNumNodeFeatures].
  std::optional<Fault> Graph(const OpcodeTable& opcodes, int64_t layout_padding, uint8_t* opcode, float* feat,
                             GraphParts* parts) const;

  Place Find(int64_t index) const;

  // Writes `feat`, [size of positions, kNumTileFeatures], of the runs at `positions`.
  void TileConfigs(const std::vector<int64_t>& positions, float* feat) const;

  // Writes `feat`, [size of positions, size of config_nodes, kNumLayoutFeatures].
  std::optional<Fault> LayoutConfigs(const std::vector<int64_t>& positions, int8_t* feat) const;
};

class Document {
 public:
  // Returns nothing where `data` is not a message of this type.
  static std::optional<Document> Parse(Bytes data, FileType type, const OpcodeTable& opcodes);

  // Returns true if any instruction has an opcode of the table.
  bool knows_opcode() const { return knows_opcode_; }
  // Returns the number of buffer allocations of an HloProto; 0 for other types.
  int64_t num_buffer_allocations() const { return num_buffer_allocations_; }
  // Returns the names of all modules and computations that have a name.
  std::vector<Bytes> Names() const;

  size_t num_tunings() const { return type_ == FileType::kTuningData ? tunings_.size() : 1; }
  Tuning TuningAt(size_t index) const;

 private:
  FileType type_;
  Bytes data_;
  std::vector<Bytes> tunings_;
  bool knows_opcode_ = false;
  int64_t num_buffer_allocations_ = 0;
};

}  // namespace tpu_graphs

#endif  // TPU_GRAPHS_HLO_CC_DOCUMENT_H_
