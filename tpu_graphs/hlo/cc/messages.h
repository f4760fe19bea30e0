// Readers of the messages: each function takes the bytes of one message and calls back with its content.
//
// The functions return false where the bytes are not such a message. `depth` is the number of further levels of
// messages that are allowed in this one.

#ifndef TPU_GRAPHS_HLO_CC_MESSAGES_H_
#define TPU_GRAPHS_HLO_CC_MESSAGES_H_

#include <cstdint>
#include <vector>

#include "wire.h"

namespace tpu_graphs {

enum class Field { kRead, kUnknown, kMalformed };

inline Field Read(bool good) { return good ? Field::kRead : Field::kMalformed; }

// Calls `known(tag, cursor)` for each field, which reads the value, or returns `Field::kUnknown` to skip the field.
template <class Known>
bool ReadFields(Bytes message, int depth, Known known) {
  Cursor cursor(message);
  while (!cursor.done()) {
    Tag tag;
    if (!cursor.ReadTag(&tag)) return false;
    switch (known(tag, cursor)) {
      case Field::kRead:
        break;
      case Field::kUnknown:
        if (!cursor.Skip(tag, depth)) return false;
        break;
      case Field::kMalformed:
        return false;
    }
  }
  return true;
}

// Reads a number. A field whose wire type differs from the schema is an unknown field.
template <class T>
Field ReadScalar(Tag tag, Cursor& cursor, T* value) {
  if (tag.type != kVarint) return Field::kUnknown;
  uint64_t raw;
  if (!cursor.ReadVarint(&raw)) return Field::kMalformed;
  *value = static_cast<T>(raw);
  return Field::kRead;
}

inline Field ReadString(Tag tag, Cursor& cursor, Bytes* value) {
  if (tag.type != kDelimited) return Field::kUnknown;
  return Read(cursor.ReadDelimited(value) && IsUtf8(*value));
}

// Reads a repeated number, packed or not.
template <class Add>
Field ReadRepeated(Tag tag, Cursor& cursor, Add add) {
  uint64_t value;
  if (tag.type == kVarint) {
    if (!cursor.ReadVarint(&value)) return Field::kMalformed;
    add(value);
    return Field::kRead;
  }
  if (tag.type != kDelimited) return Field::kUnknown;
  Bytes packed;
  if (!cursor.ReadDelimited(&packed)) return Field::kMalformed;
  for (Cursor values(packed); !values.done();) {
    if (!values.ReadVarint(&value)) return Field::kMalformed;
    add(value);
  }
  return Field::kRead;
}

// Reads a field that holds a message; `read(bytes, depth)` reads the message.
template <class ReadOne>
Field ReadMessage(Tag tag, Cursor& cursor, int depth, ReadOne read) {
  if (tag.type != kDelimited) return Field::kUnknown;
  Bytes message;
  return Read(cursor.ReadDelimited(&message) && depth > 0 && read(message, depth - 1));
}

// The first N numbers of a list, and the sum and product of all its numbers, which wrap around.
template <int N>
struct List {
  int64_t first[N];
  uint64_t sum = 0;
  uint64_t product = 1;
  int64_t size = 0;

  void Add(uint64_t value) {
    if (size < N) first[size] = static_cast<int64_t>(value);
    sum += value;
    product *= value;
    ++size;
  }
  int num_first() const { return size < N ? static_cast<int>(size) : N; }
  void Clear() {
    sum = size = 0;
    product = 1;
  }
};

// A ShapeProto.
struct Shape {
  int32_t element_type = 0;
  List<6> dimensions;
  int64_t num_tuple_shapes = 0;
  List<6> minor_to_major;

  // Merges the fields of a message into this shape.
  bool Merge(Bytes message, int depth);
};

// An HloInstructionProto.
struct Instruction {
  // The fields that few instructions have.
  struct Rare {
    List<6> window[6];  // size, stride, padding_low, padding_high, window_dilation, base_dilation
    List<6> window_reversal;
    int64_t convolution[6] = {};  // In the order of the columns, without the spatial dimensions.
    List<4> input_spatial;
    List<4> kernel_spatial;
    List<2> slice[3];  // start, stride, limit
    List<2> dynamic_slice_sizes;
    List<2> padding[2];  // edge_padding_low, edge_padding_high
  };

  Bytes name;
  Bytes opcode;
  int64_t id = 0;
  int64_t parameter_number = 0;
  int64_t feature_group_count = 0;
  int64_t batch_group_count = 0;
  bool is_stable = false;
  Shape shape;
  List<6> dimensions;
  std::vector<int64_t> operand_ids;
  std::vector<int64_t> called_computation_ids;
  bool has_rare = false;
  Rare rare;

  // Reads a message. Earlier content is cleared, but its memory is reused.
  bool Parse(Bytes message, int depth);
};

// A ConfigProfile. The nodes of a layout config are kept as messages that are read later. A later config of the other
// kind replaces an earlier one.
struct Run {
  bool error = false;
  bool is_default = false;
  bool has_profile = false;
  bool has_tile_config = false;
  bool has_module_config = false;
  int64_t time = 0;
  List<6> bounds[3];        // kernel, output, input
  std::vector<Bytes> nodes;  // NodeLayoutConfig

  bool Parse(Bytes message, int depth);
};

// Reads a TensorLayoutConfig.
template <class Add>
bool ReadTensor(Bytes message, int depth, Add add) {
  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    return tag.field == 1 ? ReadRepeated(tag, cursor, [&](uint64_t value) { add(static_cast<int32_t>(value)); })
                          : Field::kUnknown;
  });
}

// Reads a NodeLayoutConfig: `read(bytes, depth)` reads each tensor.
template <class ReadOne>
bool ReadNode(Bytes message, int depth, ReadOne read) {
  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    return tag.field == 1 ? ReadMessage(tag, cursor, depth, read) : Field::kUnknown;
  });
}

// An HloComputationProto; `read(bytes, depth)` reads each instruction.
struct Computation {
  Bytes name;
  int64_t id = 0;
  int64_t root_id = 0;

  template <class ReadOne>
  bool Parse(Bytes message, int depth, ReadOne read) {
    return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
      switch (tag.field) {
        case 1:
          return ReadString(tag, cursor, &name);
        case 2:
          return ReadMessage(tag, cursor, depth, read);
        case 5:
          return ReadScalar(tag, cursor, &id);
        case 6:
          return ReadScalar(tag, cursor, &root_id);
        default:
          return Field::kUnknown;
      }
    });
  }
};

// Reads an HloModuleProto: `read(bytes, depth)` reads each computation.
template <class ReadOne>
bool ReadModule(Bytes message, int depth, Bytes* name, ReadOne read) {
  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    switch (tag.field) {
      case 1:
        return ReadString(tag, cursor, name);
      case 3:
        return ReadMessage(tag, cursor, depth, read);
      default:
        return Field::kUnknown;
    }
  });
}

}  // namespace tpu_graphs

#endif  // TPU_GRAPHS_HLO_CC_MESSAGES_H_
