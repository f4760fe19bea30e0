// The Python module `tpu_graphs.hlo._native`; ../native.py adapts it, ../_native.pyi declares its types.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "document.h"

namespace tpu_graphs {
namespace {

namespace py = pybind11;

// Hands the vector's memory over to NumPy.
template <class T>
py::array_t<T> ToArray(std::vector<T>&& values, std::vector<py::ssize_t> shape) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  const T* data = owner->data();
  py::capsule base(owner.get(), [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  owner.release();  // NOLINT: the capsule owns it.
  return py::array_t<T>(std::move(shape), data, base);
}

template <class T>
py::array_t<T> ToArray(std::vector<T>&& values) {
  const auto size = static_cast<py::ssize_t>(values.size());
  return ToArray(std::move(values), {size});
}

py::str ToString(Bytes bytes) { return py::str(bytes.data(), bytes.size()); }

py::object ToTuple(const std::optional<Fault>& fault) {
  if (!fault) return py::none();
  return py::make_tuple(static_cast<int>(fault->kind), fault->index, fault->node, fault->value);
}

// A tuning, with ownership of the bytes that it views.
struct PyTuning {
  py::bytes data;
  std::shared_ptr<const OpcodeTable> opcodes;
  Tuning tuning;

  py::tuple Graph(int64_t layout_padding) const {
    const auto n = static_cast<py::ssize_t>(tuning.num_ops);
    py::array_t<uint8_t> opcode(n);
    py::array_t<float> feat({n, py::ssize_t{kNumNodeFeatures}});
    GraphParts parts;
    std::optional<Fault> fault;
    {
      uint8_t* opcode_data = opcode.mutable_data();
      float* feat_data = feat.mutable_data();
      py::gil_scoped_release release;
      fault = tuning.Graph(*opcodes, layout_padding, opcode_data, feat_data, &parts);
    }
    py::dict unknown;
    for (const auto& [name, count] : parts.unknown_opcodes) unknown[ToString(name)] = count;
    const auto num_edges = static_cast<py::ssize_t>(parts.edges.size() / 2);
    return py::make_tuple(ToTuple(fault), opcode, feat, ToArray(std::move(parts.edges), {num_edges, 2}),
                          ToArray(std::move(parts.computation_sizes)), ToArray(std::move(parts.ends_segment)), unknown);
  }

  py::tuple Find(int64_t index) const {
    const Place place = tuning.Find(index);
    return py::make_tuple(ToString(place.computation), ToString(place.instruction), place.id);
  }

  void CheckPositions(const std::vector<int64_t>& positions) const {
    for (const int64_t position : positions) {
      if (position < 0 || position >= static_cast<int64_t>(tuning.runs.messages.size())) {
        throw py::index_error("no run " + std::to_string(position));
      }
    }
  }

  py::array_t<float> TileConfigs(const std::vector<int64_t>& positions) const {
    CheckPositions(positions);
    py::array_t<float> feat({static_cast<py::ssize_t>(positions.size()), py::ssize_t{kNumTileFeatures}});
    float* data = feat.mutable_data();
    py::gil_scoped_release release;
    tuning.TileConfigs(positions, data);
    return feat;
  }

  py::tuple LayoutConfigs(const std::vector<int64_t>& positions) const {
    CheckPositions(positions);
    py::array_t<int8_t> feat({static_cast<py::ssize_t>(positions.size()),
                              static_cast<py::ssize_t>(tuning.config_nodes.size()), py::ssize_t{kNumLayoutFeatures}});
    std::optional<Fault> fault;
    {
      int8_t* data = feat.mutable_data();
      py::gil_scoped_release release;
      fault = tuning.LayoutConfigs(positions, data);
    }
    return py::make_tuple(ToTuple(fault), feat);
  }

  py::bytes Hlo() const {
    std::string hlo;
    for (const Bytes message : tuning.module) hlo.append(message);
    return py::bytes(hlo);
  }
};

// A document, with ownership of the bytes that it views.
struct PyDocument {
  py::bytes data;
  std::shared_ptr<const OpcodeTable> opcodes;
  Document document;

  PyTuning TuningAt(size_t index) const {
    if (index >= document.num_tunings()) throw py::index_error("no module " + std::to_string(index));
    Tuning tuning;
    {
      py::gil_scoped_release release;
      tuning = document.TuningAt(index);
    }
    return {data, opcodes, std::move(tuning)};
  }

  py::list Names() const {
    py::list names;
    for (const Bytes name : document.Names()) names.append(ToString(name));
    return names;
  }
};

std::optional<PyDocument> Parse(py::bytes data, int type, std::shared_ptr<const OpcodeTable> opcodes) {
  if (type < 0 || type > static_cast<int>(FileType::kHloModuleProto)) throw py::value_error("no such type");
  const Bytes bytes = data;
  std::optional<Document> document;
  {
    py::gil_scoped_release release;
    document = Document::Parse(bytes, static_cast<FileType>(type), *opcodes);
  }
  if (!document) return std::nullopt;
  return PyDocument{std::move(data), std::move(opcodes), *std::move(document)};
}

std::shared_ptr<OpcodeTable> MakeOpcodeTable(const std::vector<std::pair<std::string, int>>& names) {
  std::vector<std::pair<std::string, uint8_t>> table;
  for (const auto& [name, id] : names) {
    if (id < 1 || id > UINT8_MAX || table.size() == UINT8_MAX) throw py::value_error("opcode out of range: " + name);
    table.emplace_back(name, static_cast<uint8_t>(id));
  }
  return std::make_shared<OpcodeTable>(std::move(table));
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "HLO protobufs -> arrays, in C++.";
  py::class_<OpcodeTable, std::shared_ptr<OpcodeTable>>(module, "OpcodeTable").def(py::init(&MakeOpcodeTable));
  py::class_<PyTuning>(module, "Tuning")
      .def_property_readonly("has_module", [](const PyTuning& self) { return self.tuning.has_module; })
      .def_property_readonly("name", [](const PyTuning& self) { return ToString(self.tuning.name); })
      .def_property_readonly("fingerprint", [](const PyTuning& self) { return self.tuning.fingerprint; })
      .def_property_readonly("num_ops", [](const PyTuning& self) { return self.tuning.num_ops; })
      .def_property_readonly("config_nodes", [](const PyTuning& self) {
        return ToArray(std::vector<uint64_t>(self.tuning.config_nodes));
      })
      .def_property_readonly("run_flags", [](const PyTuning& self) {
        return ToArray(std::vector<uint8_t>(self.tuning.runs.flags));
      })
      .def_property_readonly("run_time", [](const PyTuning& self) {
        return ToArray(std::vector<int64_t>(self.tuning.runs.time));
      })
      .def("graph", &PyTuning::Graph, py::arg("layout_padding"))
      .def("find", &PyTuning::Find, py::arg("index"))
      .def("tile_configs", &PyTuning::TileConfigs, py::arg("positions"))
      .def("layout_configs", &PyTuning::LayoutConfigs, py::arg("positions"))
      .def("hlo", &PyTuning::Hlo);
  py::class_<PyDocument>(module, "Document")
      .def_property_readonly("num_tunings", [](const PyDocument& self) { return self.document.num_tunings(); })
      .def_property_readonly("knows_opcode", [](const PyDocument& self) { return self.document.knows_opcode(); })
      .def_property_readonly("num_buffer_allocations",
                             [](const PyDocument& self) { return self.document.num_buffer_allocations(); })
      .def("names", &PyDocument::Names)
      .def("tuning", &PyDocument::TuningAt, py::arg("index"));
  module.def("parse", &Parse, py::arg("data"), py::arg("type"), py::arg("opcodes"));
}

}  // namespace tpu_graphs
