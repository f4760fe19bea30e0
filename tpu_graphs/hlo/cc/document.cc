#include "document.h"

#include <algorithm>
#include <iterator>
#include <tuple>

#include "messages.h"

namespace tpu_graphs {
namespace {

// First column of each block of node features; their names are in tpu_graphs/tables/node_features.csv.
enum Column {
  kIsRoot = 0,
  kElementType = 2,
  kShapeDimensions = 21,
  kTupleShapes = 29,
  kParameterNumber = 30,
  kDimensions = 31,
  kWindow = 37,  // Seven lists; the last, window_reversal, is counted, not summed.
  kConvolution = 93,
  kFeatureGroupCount = 107,
  kBatchGroupCount = 108,
  kSlice = 109,
  kDynamicSlice = 121,
  kPadding = 125,
  kIsStable = 133,
  kMinorToMajor = 134,
};
constexpr int kWindowLists = 6;
constexpr int kWindowReversal = kWindow + kWindowLists * 8;

// Numbers of the element types in the order of their one-hot columns; other types have no column.
constexpr int kElementTypes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 15, 18, 13, 14, 17};
constexpr int kNumElementTypes = std::size(kElementTypes);
static_assert(kElementType + kNumElementTypes == kShapeDimensions);

uint64_t Hash(Bytes bytes) {  // FNV-1a: http://www.isthe.com/chongo/tech/comp/fnv
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3u;
  return hash ^ hash >> 32;
}

// An int64 becomes the nearest float32 directly; a double between the two would round twice.
float ToFloat(int64_t value) { return static_cast<float>(value); }

template <int N>
void WriteFirst(const List<N>& list, float* columns) {
  for (int i = 0; i < list.num_first(); ++i) columns[i] = ToFloat(list.first[i]);
}

template <int N>
void WriteSummary(const List<N>& list, float* columns) {
  WriteFirst(list, columns);
  columns[N] = ToFloat(static_cast<int64_t>(list.sum));
  columns[N + 1] = ToFloat(static_cast<int64_t>(list.product));
}

// Returns the features of an instruction without any field; the fields that are set are written over them.
std::array<float, kNumNodeFeatures> EmptyRow(int64_t layout_padding) {
  std::array<float, kNumNodeFeatures> row{};
  row[kShapeDimensions + 7] = 1;  // The product of no values is 1.
  for (int i = 0; i < kWindowLists; ++i) row[kWindow + 8 * i + 7] = 1;
  for (int i = 0; i < 3; ++i) row[kSlice + 4 * i + 3] = 1;
  row[kDynamicSlice + 3] = 1;
  for (int i = 0; i < 2; ++i) row[kPadding + 4 * i + 3] = 1;
  for (int i = 0; i < 6; ++i) row[kMinorToMajor + i] = ToFloat(layout_padding);
  return row;
}

void WriteRare(const Instruction::Rare& rare, float* row) {
  for (int i = 0; i < kWindowLists; ++i) WriteSummary(rare.window[i], row + kWindow + 8 * i);
  WriteFirst(rare.window_reversal, row + kWindowReversal);
  const auto reversed = static_cast<int64_t>(rare.window_reversal.sum);
  row[kWindowReversal + 6] = ToFloat(reversed);
  row[kWindowReversal + 7] = ToFloat(rare.window_reversal.size - reversed);
  float* columns = row + kConvolution;
  columns[0] = ToFloat(rare.convolution[0]);
  columns[1] = ToFloat(rare.convolution[1]);
  WriteFirst(rare.input_spatial, columns + 2);
  columns[6] = ToFloat(rare.convolution[2]);
  columns[7] = ToFloat(rare.convolution[3]);
  WriteFirst(rare.kernel_spatial, columns + 8);
  columns[12] = ToFloat(rare.convolution[4]);
  columns[13] = ToFloat(rare.convolution[5]);
  for (int i = 0; i < 3; ++i) WriteSummary(rare.slice[i], row + kSlice + 4 * i);
  WriteSummary(rare.dynamic_slice_sizes, row + kDynamicSlice);
  for (int i = 0; i < 2; ++i) WriteSummary(rare.padding[i], row + kPadding + 4 * i);
}

// Writes all features but is_root, which depends on the computation.
void WriteRow(const Instruction& instruction, float* row) {
  const Shape& shape = instruction.shape;
  const auto* type = std::find(std::begin(kElementTypes), std::end(kElementTypes), shape.element_type);
  if (type != std::end(kElementTypes)) row[kElementType + (type - kElementTypes)] = 1;
  WriteSummary(shape.dimensions, row + kShapeDimensions);
  row[kTupleShapes] = ToFloat(shape.num_tuple_shapes);
  row[kParameterNumber] = ToFloat(instruction.parameter_number);
  WriteFirst(instruction.dimensions, row + kDimensions);
  row[kFeatureGroupCount] = ToFloat(instruction.feature_group_count);
  row[kBatchGroupCount] = ToFloat(instruction.batch_group_count);
  row[kIsStable] = instruction.is_stable ? 1 : 0;
  WriteFirst(shape.minor_to_major, row + kMinorToMajor);
  if (instruction.has_rare) WriteRare(instruction.rare, row);
}

// Id -> index of the last instruction that has the id.
class IndexOfId {
 public:
  explicit IndexOfId(const std::vector<int64_t>& ids) : ids_(ids) {
    if (ids.empty()) return;
    const auto [low, high] = std::minmax_element(ids.begin(), ids.end());
    low_ = *low;
    const uint64_t range = Offset(*high);
    if (range < 4 * static_cast<uint64_t>(ids.size()) + 64) {
      table_.assign(range + 1, -1);
      for (size_t i = 0; i < ids.size(); ++i) table_[Offset(ids[i])] = static_cast<int64_t>(i);
      return;
    }
    sorted_.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) sorted_[i] = static_cast<int64_t>(i);
    std::sort(sorted_.begin(), sorted_.end(),
              [&](int64_t a, int64_t b) { return ids[a] != ids[b] ? ids[a] < ids[b] : a < b; });
  }

  // Returns -1 where no instruction has the id.
  int64_t Find(int64_t id) const {
    if (!table_.empty()) {
      return id >= low_ && Offset(id) < table_.size() ? table_[Offset(id)] : -1;
    }
    const auto after = std::upper_bound(sorted_.begin(), sorted_.end(), id,
                                        [&](int64_t key, int64_t index) { return key < ids_[index]; });
    return after != sorted_.begin() && ids_[*(after - 1)] == id ? *(after - 1) : -1;
  }

 private:
  uint64_t Offset(int64_t id) const { return static_cast<uint64_t>(id) - static_cast<uint64_t>(low_); }

  const std::vector<int64_t>& ids_;
  int64_t low_ = 0;
  std::vector<int64_t> table_;   // Index at each id - low_, used where ids are dense.
  std::vector<int64_t> sorted_;  // Indices ordered by id, used where ids are sparse.
};

// Lists of ids, one per instruction.
struct IdLists {
  std::vector<int64_t> values;
  std::vector<int64_t> ends;

  void Add(const std::vector<int64_t>& list) {
    values.insert(values.end(), list.begin(), list.end());
    ends.push_back(static_cast<int64_t>(values.size()));
  }

  // Calls `use(index of the instruction, id)` for each id; stops where `use` returns false.
  template <class Use>
  bool ForEach(Use use) const {
    int64_t start = 0;
    for (size_t index = 0; index < ends.size(); ++index) {
      for (; start < ends[index]; ++start) {
        if (!use(static_cast<int64_t>(index), values[start])) return false;
      }
    }
    return true;
  }
};

struct Links {
  std::vector<int64_t> ids;  // Ids of the instructions.
  IdLists operands;
  IdLists called;
  std::vector<std::pair<int64_t, int64_t>> root_of_computation;  // Id of the computation, id of its root.
};

std::optional<Fault> WriteEdges(Links& links, std::vector<int64_t>* edges) {
  std::optional<Fault> fault;
  const IndexOfId index_of_id(links.ids);
  const auto check = [&](bool good, Fault::Kind kind, int64_t index, int64_t id) {
    if (!good) fault = Fault{kind, index, 0, id};
    return good;
  };
  // From here on, `links.operands` holds indices in place of ids.
  int64_t position = 0;
  links.operands.ForEach([&](int64_t index, int64_t id) {
    const int64_t operand = index_of_id.Find(id);
    links.operands.values[position++] = operand;
    return check(operand >= 0, Fault::kUnknownOperand, index, id);
  });
  if (fault) return fault;

  auto& roots = links.root_of_computation;  // Where computations share an id, the last counts.
  std::stable_sort(roots.begin(), roots.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto root_of = [&](int64_t id) {
    const auto after = std::upper_bound(roots.begin(), roots.end(), id,
                                        [](int64_t key, const auto& root) { return key < root.first; });
    return after != roots.begin() && (after - 1)->first == id ? &(after - 1)->second : nullptr;
  };
  links.called.ForEach(
      [&](int64_t index, int64_t id) { return check(root_of(id) != nullptr, Fault::kUnknownComputation, index, id); });
  if (fault) return fault;
  links.called.ForEach([&](int64_t index, int64_t id) {
    return check(index_of_id.Find(*root_of(id)) >= 0, Fault::kMissingRoot, index, id);
  });
  if (fault) return fault;

  // Where instructions share an id, it stands for the last of them.
  const auto own_index = [&](int64_t index) { return index_of_id.Find(links.ids[index]); };
  links.operands.ForEach([&](int64_t index, int64_t operand) {
    return check(own_index(index) != operand, Fault::kSelfReference, index, links.ids[index]);
  });
  if (fault) return fault;
  links.called.ForEach([&](int64_t index, int64_t id) {
    return check(own_index(index) != index_of_id.Find(*root_of(id)), Fault::kSelfReference, index, links.ids[index]);
  });
  if (fault) return fault;

  // An operand counts once per instruction, a called computation as often as it is called.
  edges->reserve(2 * (links.operands.values.size() + links.called.values.size()));
  std::vector<int64_t> own;
  bool sorted = true;
  int64_t operand = 0, called = 0, last = -1;
  for (size_t index = 0; index < links.ids.size(); ++index) {
    own.assign(links.operands.values.begin() + operand, links.operands.values.begin() + links.operands.ends[index]);
    operand = links.operands.ends[index];
    std::sort(own.begin(), own.end());
    own.erase(std::unique(own.begin(), own.end()), own.end());
    for (; called < links.called.ends[index]; ++called) {
      own.push_back(index_of_id.Find(*root_of(links.called.values[called])));
    }
    if (own.empty()) continue;
    std::sort(own.begin(), own.end());
    const int64_t consumer = own_index(static_cast<int64_t>(index));
    sorted = sorted && consumer > last;
    last = consumer;
    for (const int64_t producer : own) {
      edges->push_back(consumer);
      edges->push_back(producer);
    }
  }
  if (!sorted) {  // Instructions share an id.
    std::vector<std::pair<int64_t, int64_t>> rows(edges->size() / 2);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = {(*edges)[2 * i], (*edges)[2 * i + 1]};
    std::sort(rows.begin(), rows.end());
    for (size_t i = 0; i < rows.size(); ++i) std::tie((*edges)[2 * i], (*edges)[2 * i + 1]) = rows[i];
  }
  return fault;
}

bool EndsSegment(Bytes name) {
  for (const Bytes part : {"cluster", "while", "cond"}) {
    if (name.find(part) != Bytes::npos) return true;
  }
  return false;
}

// Calls `read(computation message)` for each computation of a module that has been checked.
template <class ReadOne>
void ForEachComputation(const std::vector<Bytes>& module, ReadOne read) {
  for (const Bytes message : module) {
    Bytes name;
    ReadModule(message, kMaxDepth, &name, [&](Bytes computation, int) {
      read(computation);
      return true;
    });
  }
}

}  // namespace

OpcodeTable::OpcodeTable(std::vector<std::pair<std::string, uint8_t>> names) : names_(std::move(names)) {
  names_.resize(std::min<size_t>(names_.size(), UINT8_MAX));
  for (size_t i = 0; i < names_.size(); ++i) {
    size_t slot = Hash(names_[i].first) % kSlots;
    while (slots_[slot]) slot = (slot + 1) % kSlots;
    slots_[slot] = static_cast<uint8_t>(i + 1);
  }
}

uint8_t OpcodeTable::Find(Bytes name) const {
  for (size_t slot = Hash(name) % kSlots; slots_[slot]; slot = (slot + 1) % kSlots) {
    const auto& [found, id] = names_[slots_[slot] - 1];
    if (found == name) return id;
  }
  return 0;
}

std::optional<Fault> Tuning::Graph(const OpcodeTable& opcodes, int64_t layout_padding, uint8_t* opcode, float* feat,
                                   GraphParts* parts) const {
  const auto empty_row = EmptyRow(layout_padding);
  Links links;
  links.ids.reserve(num_ops);
  links.operands.ends.reserve(num_ops);
  links.called.ends.reserve(num_ops);
  std::vector<Bytes> unknown_opcodes;
  Instruction instruction;

  ForEachComputation(module, [&](Bytes message) {
    Computation computation;
    const size_t start = links.ids.size();
    computation.Parse(message, kMaxDepth, [&](Bytes one, int depth) {
      instruction.Parse(one, depth);
      const size_t index = links.ids.size();
      float* row = feat + index * kNumNodeFeatures;
      std::copy(empty_row.begin(), empty_row.end(), row);
      WriteRow(instruction, row);
      opcode[index] = opcodes.Find(instruction.opcode);
      if (opcode[index] == 0) unknown_opcodes.push_back(instruction.opcode);
      links.ids.push_back(instruction.id);
      links.operands.Add(instruction.operand_ids);
      links.called.Add(instruction.called_computation_ids);
      return true;
    });
    for (size_t index = start; index < links.ids.size(); ++index) {
      if (links.ids[index] == computation.root_id) feat[index * kNumNodeFeatures + kIsRoot] = 1;
    }
    links.root_of_computation.emplace_back(computation.id, computation.root_id);
    parts->computation_sizes.push_back(static_cast<int64_t>(links.ids.size() - start));
    parts->ends_segment.push_back(EndsSegment(computation.name));
  });
  std::sort(unknown_opcodes.begin(), unknown_opcodes.end());
  for (const Bytes name : unknown_opcodes) {
    auto& counts = parts->unknown_opcodes;
    if (counts.empty() || counts.back().first != name) counts.emplace_back(name, 0);
    ++counts.back().second;
  }
  return WriteEdges(links, &parts->edges);
}

Place Tuning::Find(int64_t index) const {
  Place place{};
  int64_t at = 0;
  ForEachComputation(module, [&](Bytes message) {
    Computation computation;
    bool here = false;
    computation.Parse(message, kMaxDepth, [&](Bytes one, int depth) {
      if (at++ == index) {
        Instruction instruction;
        instruction.Parse(one, depth);
        place.instruction = instruction.name;
        place.id = instruction.id;
        here = true;
      }
      return true;
    });
    if (here) place.computation = computation.name;
  });
  return place;
}

void Tuning::TileConfigs(const std::vector<int64_t>& positions, float* feat) const {
  Run run;
  for (const int64_t position : positions) {
    run.Parse(runs.messages[position], kMaxDepth);
    for (auto& bounds : run.bounds) {
      std::fill_n(feat, 8, 0.0f);
      if (bounds.size == 0) bounds.product = 0;  // In a config, unlike an instruction, the product of no values is 0.
      WriteSummary(bounds, feat);
      feat += 8;
    }
  }
}

std::optional<Fault> Tuning::LayoutConfigs(const std::vector<int64_t>& positions, int8_t* feat) const {
  Run run;
  for (const int64_t position : positions) {
    run.Parse(runs.messages[position], kMaxDepth);
    if (run.nodes.size() != config_nodes.size()) {
      return Fault{Fault::kNodeCount, position, 0, static_cast<int64_t>(run.nodes.size())};
    }
    std::fill_n(feat, run.nodes.size() * kNumLayoutFeatures, int8_t{-1});
    for (size_t node = 0; node < run.nodes.size(); ++node) {
      std::optional<Fault> fault;
      int64_t num_tensors = 0;
      ReadNode(run.nodes[node], kMaxDepth, [&](Bytes tensor, int depth) {
        int dimension = 0;
        return ReadTensor(tensor, depth, [&](int32_t value) {
          if (num_tensors >= kLayoutTensors || dimension >= kLayoutDimensions) return;
          if (value < INT8_MIN || value > INT8_MAX) {
            if (!fault) fault = Fault{Fault::kDimension, position, static_cast<int64_t>(node), value};
            return;
          }
          feat[num_tensors * kLayoutDimensions + dimension++] = static_cast<int8_t>(value);
        }) && ++num_tensors > 0;
      });
      if (num_tensors > kLayoutTensors) {
        return Fault{Fault::kTensorCount, position, static_cast<int64_t>(node), num_tensors};
      }
      if (fault) return fault;
      feat += kNumLayoutFeatures;
    }
  }
  return std::nullopt;
}

std::optional<Document> Document::Parse(Bytes data, FileType type, const OpcodeTable& opcodes) {
  Document document;
  document.type_ = type;
  document.data_ = data;
  Instruction instruction;
  Run run;
  const auto check_instruction = [&](Bytes message, int depth) {
    if (!instruction.Parse(message, depth)) return false;
    document.knows_opcode_ = document.knows_opcode_ || opcodes.Find(instruction.opcode);
    return true;
  };
  const auto check_computation = [&](Bytes message, int depth) {
    return Computation().Parse(message, depth, check_instruction);
  };
  const auto check_module = [&](Bytes message, int depth) {
    Bytes name;
    return ReadModule(message, depth, &name, check_computation);
  };
  const auto check_tuning = [&](Bytes message, int depth) {
    return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
      uint64_t ignored;
      switch (tag.field) {
        case 1:
          return ReadMessage(tag, cursor, depth, check_module);
        case 2:
          return ReadScalar(tag, cursor, &ignored);
        case 3:
          return ReadMessage(tag, cursor, depth, [&](Bytes one, int depth_left) { return run.Parse(one, depth_left); });
        case 4:
          return ReadRepeated(tag, cursor, [](uint64_t) {});
        default:
          return Field::kUnknown;
      }
    });
  };

  bool good = false;
  switch (type) {
    case FileType::kTuningData:
      good = ReadFields(data, kMaxDepth, [&](Tag tag, Cursor& cursor) {
        if (tag.field != 1) return Field::kUnknown;
        return ReadMessage(tag, cursor, kMaxDepth, [&](Bytes message, int depth) {
          document.tunings_.push_back(message);
          return check_tuning(message, depth);
        });
      });
      break;
    case FileType::kModuleTuningData:
      good = check_tuning(data, kMaxDepth);
      break;
    case FileType::kHloProto:
      good = ReadFields(data, kMaxDepth, [&](Tag tag, Cursor& cursor) {
        switch (tag.field) {
          case 1:
            return ReadMessage(tag, cursor, kMaxDepth, check_module);
          case 3:
            return ReadMessage(tag, cursor, kMaxDepth, [&](Bytes assignment, int depth) {
              return ReadFields(assignment, depth, [&](Tag inner, Cursor& allocations) {
                if (inner.field != 3) return Field::kUnknown;
                return ReadMessage(inner, allocations, depth, [&](Bytes allocation, int depth_left) {
                  ++document.num_buffer_allocations_;
                  return ReadFields(allocation, depth_left, [](Tag, Cursor&) { return Field::kUnknown; });
                });
              });
            });
          default:
            return Field::kUnknown;
        }
      });
      break;
    case FileType::kHloModuleProto:
      good = check_module(data, kMaxDepth);
      break;
  }
  return good ? std::optional(std::move(document)) : std::nullopt;
}

std::vector<Bytes> Document::Names() const {
  std::vector<Bytes> names;
  const auto add = [&](Bytes name) {
    if (!name.empty()) names.push_back(name);
  };
  for (size_t i = 0; i < num_tunings(); ++i) {
    const Tuning tuning = TuningAt(i);
    add(tuning.name);
    ForEachComputation(tuning.module, [&](Bytes message) {
      Computation computation;
      computation.Parse(message, kMaxDepth, [](Bytes, int) { return true; });
      add(computation.name);
    });
  }
  return names;
}

Tuning Document::TuningAt(size_t index) const {
  Tuning tuning;
  const auto add_module = [&](Bytes message, int depth) {
    tuning.has_module = true;
    tuning.module.push_back(message);
    return ReadModule(message, depth, &tuning.name, [&](Bytes computation, int depth_left) {
      return Computation().Parse(computation, depth_left, [&](Bytes, int) {
        ++tuning.num_ops;
        return true;
      });
    });
  };
  if (type_ == FileType::kHloModuleProto) {
    add_module(data_, kMaxDepth);
    return tuning;
  }
  if (type_ == FileType::kHloProto) {
    ReadFields(data_, kMaxDepth, [&](Tag tag, Cursor& cursor) {
      return tag.field == 1 ? ReadMessage(tag, cursor, kMaxDepth, add_module) : Field::kUnknown;
    });
    return tuning;
  }
  const Bytes message = type_ == FileType::kTuningData ? tunings_[index] : data_;
  Run run;
  ReadFields(message, kMaxDepth, [&](Tag tag, Cursor& cursor) {
    switch (tag.field) {
      case 1:
        return ReadMessage(tag, cursor, kMaxDepth, add_module);
      case 2:
        return ReadScalar(tag, cursor, &tuning.fingerprint);
      case 3:
        return ReadMessage(tag, cursor, kMaxDepth, [&](Bytes one, int depth) {
          run.Parse(one, depth);
          Runs& runs = tuning.runs;
          runs.messages.push_back(one);
          runs.time.push_back(run.time);
          runs.flags.push_back((run.error ? Runs::kError : 0) | (run.has_profile ? Runs::kProfile : 0) |
                               (run.has_tile_config ? Runs::kTileConfig : 0) |
                               (run.has_module_config ? Runs::kModuleConfig : 0) | (run.is_default ? Runs::kDefault : 0));
          return true;
        });
      case 4:
        return ReadRepeated(tag, cursor, [&](uint64_t value) { tuning.config_nodes.push_back(value); });
      default:
        return Field::kUnknown;
    }
  });
  return tuning;
}

}  // namespace tpu_graphs
