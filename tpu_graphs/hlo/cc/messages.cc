#include "messages.h"

namespace tpu_graphs {
namespace {

// Reads a message of scalars with the field numbers 1 to N into `values`.
template <int N>
bool ReadScalars(Bytes message, int depth, int64_t (&values)[N]) {
  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    return tag.field <= N ? ReadScalar(tag, cursor, &values[tag.field - 1]) : Field::kUnknown;
  });
}

bool ReadWindow(Bytes message, int depth, Instruction::Rare* rare) {
  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    if (tag.field != 1) return Field::kUnknown;
    return ReadMessage(tag, cursor, depth, [&](Bytes dimension, int depth_left) {
      int64_t values[7] = {};
      if (!ReadScalars(dimension, depth_left, values)) return false;
      for (int i = 0; i < 6; ++i) rare->window[i].Add(values[i]);
      rare->window_reversal.Add(values[6] != 0);
      return true;
    });
  });
}

bool ReadConvolution(Bytes message, int depth, Instruction::Rare* rare) {
  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    switch (tag.field) {
      case 3:
        return ReadScalar(tag, cursor, &rare->convolution[2]);  // kernel_input_feature_dimension
      case 4:
        return ReadScalar(tag, cursor, &rare->convolution[3]);  // kernel_output_feature_dimension
      case 6:
        return ReadRepeated(tag, cursor, [&](uint64_t value) { rare->kernel_spatial.Add(value); });
      case 7:
        return ReadScalar(tag, cursor, &rare->convolution[0]);  // input_batch_dimension
      case 8:
        return ReadScalar(tag, cursor, &rare->convolution[1]);  // input_feature_dimension
      case 9:
        return ReadScalar(tag, cursor, &rare->convolution[4]);  // output_batch_dimension
      case 10:
        return ReadScalar(tag, cursor, &rare->convolution[5]);  // output_feature_dimension
      case 11:
        return ReadRepeated(tag, cursor, [&](uint64_t value) { rare->input_spatial.Add(value); });
      default:
        return Field::kUnknown;
    }
  });
}

bool ReadPadding(Bytes message, int depth, Instruction::Rare* rare) {
  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    if (tag.field != 1) return Field::kUnknown;
    return ReadMessage(tag, cursor, depth, [&](Bytes dimension, int depth_left) {
      int64_t values[2] = {};
      if (!ReadScalars(dimension, depth_left, values)) return false;
      for (int i = 0; i < 2; ++i) rare->padding[i].Add(values[i]);
      return true;
    });
  });
}

bool ReadSlice(Bytes message, int depth, Instruction::Rare* rare) {
  int64_t values[3] = {};  // start, limit, stride
  if (!ReadScalars(message, depth, values)) return false;
  rare->slice[0].Add(values[0]);
  rare->slice[1].Add(values[2]);
  rare->slice[2].Add(values[1]);
  return true;
}

}  // namespace

bool Shape::Merge(Bytes message, int depth) {
  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    switch (tag.field) {
      case 2:
        return ReadScalar(tag, cursor, &element_type);
      case 3:
        return ReadRepeated(tag, cursor, [&](uint64_t value) { dimensions.Add(value); });
      case 4:
        return ReadMessage(tag, cursor, depth, [&](Bytes element, int depth_left) {
          ++num_tuple_shapes;  // Only their number counts, but they must be shapes.
          return Shape().Merge(element, depth_left);
        });
      case 5:
        return ReadMessage(tag, cursor, depth, [&](Bytes layout, int depth_left) {
          return ReadFields(layout, depth_left, [&](Tag inner, Cursor& values) {
            if (inner.field != 1) return Field::kUnknown;
            return ReadRepeated(inner, values, [&](uint64_t value) { minor_to_major.Add(value); });
          });
        });
      default:
        return Field::kUnknown;
    }
  });
}

bool Instruction::Parse(Bytes message, int depth) {
  name = opcode = Bytes();
  id = parameter_number = feature_group_count = batch_group_count = 0;
  is_stable = false;
  shape.element_type = 0;
  shape.num_tuple_shapes = 0;
  shape.dimensions.Clear();
  shape.minor_to_major.Clear();
  dimensions.Clear();
  operand_ids.clear();
  called_computation_ids.clear();
  if (has_rare) rare = Rare();
  has_rare = false;

  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    const auto read_rare = [&](auto read) {
      has_rare = true;
      return ReadMessage(tag, cursor, depth, [&](Bytes inner, int depth_left) { return read(inner, depth_left, &rare); });
    };
    switch (tag.field) {
      case 1:
        return ReadString(tag, cursor, &name);
      case 2:
        return ReadString(tag, cursor, &opcode);
      case 3:
        return ReadMessage(tag, cursor, depth,
                           [&](Bytes inner, int depth_left) { return shape.Merge(inner, depth_left); });
      case 9:
        return ReadScalar(tag, cursor, &parameter_number);
      case 14:
        return ReadRepeated(tag, cursor, [&](uint64_t value) { dimensions.Add(value); });
      case 15:
        return read_rare(ReadWindow);
      case 16:
        return read_rare(ReadConvolution);
      case 17:
        return read_rare(ReadSlice);
      case 20:
        has_rare = true;
        return ReadRepeated(tag, cursor, [&](uint64_t value) { rare.dynamic_slice_sizes.Add(value); });
      case 21:
        return read_rare(ReadPadding);
      case 35:
        return ReadScalar(tag, cursor, &id);
      case 36:
        return ReadRepeated(tag, cursor, [&](uint64_t value) { operand_ids.push_back(static_cast<int64_t>(value)); });
      case 38:
        return ReadRepeated(
            tag, cursor, [&](uint64_t value) { called_computation_ids.push_back(static_cast<int64_t>(value)); });
      case 50:
        return ReadScalar(tag, cursor, &feature_group_count);
      case 58:
        return ReadScalar(tag, cursor, &batch_group_count);
      case 60:
        return ReadScalar(tag, cursor, &is_stable);
      default:
        return Field::kUnknown;
    }
  });
}

bool Run::Parse(Bytes message, int depth) {
  error = is_default = has_profile = has_tile_config = has_module_config = false;
  time = 0;
  for (auto& list : bounds) list.Clear();
  nodes.clear();
  bool has_op_config = false;

  const auto read_tile_config = [&](Bytes config, int depth_left) {
    has_tile_config = true;
    return ReadFields(config, depth_left, [&](Tag tag, Cursor& cursor) {
      if (tag.field > 3) return Field::kUnknown;
      return ReadRepeated(tag, cursor, [&](uint64_t value) { bounds[tag.field - 1].Add(value); });
    });
  };
  const auto read_layout_config = [&](Bytes config, int depth_left) {
    return ReadFields(config, depth_left, [&](Tag tag, Cursor& cursor) {
      if (tag.field != 1) return Field::kUnknown;
      return ReadMessage(tag, cursor, depth_left, [&](Bytes node, int depth_in_node) {
        nodes.push_back(node);
        return ReadNode(node, depth_in_node, [](Bytes tensor, int depth_in_tensor) {
          return ReadTensor(tensor, depth_in_tensor, [](int32_t) {});
        });
      });
    });
  };
  // Both kinds of config hold one known message, in field 1.
  const auto read_config = [](Bytes config, int depth_left, auto read) {
    return ReadFields(config, depth_left, [&](Tag tag, Cursor& cursor) {
      return tag.field == 1 ? ReadMessage(tag, cursor, depth_left, read) : Field::kUnknown;
    });
  };

  return ReadFields(message, depth, [&](Tag tag, Cursor& cursor) {
    switch (tag.field) {
      case 1:
        return ReadMessage(tag, cursor, depth, [&](Bytes config, int depth_left) {
          if (!has_op_config) nodes.clear();
          has_op_config = true;
          has_module_config = false;
          return read_config(config, depth_left, read_tile_config);
        });
      case 2:
        return ReadMessage(tag, cursor, depth, [&](Bytes config, int depth_left) {
          if (has_op_config) {
            for (auto& list : bounds) list.Clear();
          }
          has_op_config = has_tile_config = false;
          has_module_config = true;
          return read_config(config, depth_left, read_layout_config);
        });
      case 3:
        return ReadScalar(tag, cursor, &error);
      case 4:
        return ReadMessage(tag, cursor, depth, [&](Bytes profile, int depth_left) {
          has_profile = true;
          return ReadFields(profile, depth_left, [&](Tag inner, Cursor& values) {
            return inner.field == 4 ? ReadScalar(inner, values, &time) : Field::kUnknown;
          });
        });
      case 5:
        return ReadScalar(tag, cursor, &is_default);
      default:
        return Field::kUnknown;
    }
  });
}

}  // namespace tpu_graphs
