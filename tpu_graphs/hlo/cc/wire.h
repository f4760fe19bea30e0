// The protobuf wire format: https://protobuf.dev/programming-guides/encoding.
//
// Input is untrusted. Each read is checked against the end of the message. The same input is refused here as by
// protobuf's own parser, so that both implementations of the extractor accept the same files.

#ifndef TPU_GRAPHS_HLO_CC_WIRE_H_
#define TPU_GRAPHS_HLO_CC_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tpu_graphs {

using Bytes = std::string_view;

constexpr int kMaxDepth = 100;  // Levels of nested messages and groups, as in protobuf.

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kDelimited = 2, kStartGroup = 3, kEndGroup = 4, kFixed32 = 5 };

struct Tag {
  uint32_t field;
  uint32_t type;
};

// Reads the fields of one message. A method returns false where the bytes are not a message; no method may be called
// afterwards.
class Cursor {
 public:
  explicit Cursor(Bytes bytes)
      : at_(reinterpret_cast<const uint8_t*>(bytes.data())), end_(at_ + bytes.size()) {}

  bool done() const { return at_ == end_; }

  bool ReadTag(Tag* tag) {
    uint64_t value;
    const uint8_t* start = at_;
    if (!ReadVarint(&value) || value > UINT32_MAX || at_ - start > 5) return false;
    *tag = {static_cast<uint32_t>(value) >> 3, static_cast<uint32_t>(value) & 7};
    return tag->field != 0;
  }

  // Bits beyond the 64th are dropped, as in protobuf.
  bool ReadVarint(uint64_t* value) {
    if (at_ != end_ && *at_ < 0x80) {
      *value = *at_++;
      return true;
    }
    uint64_t result = 0;
    for (int shift = 0; shift < 70 && at_ != end_; shift += 7) {
      const uint8_t byte = *at_++;
      result |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) {
        *value = result;
        return true;
      }
    }
    return false;
  }

  bool ReadDelimited(Bytes* bytes) {
    uint64_t size;
    if (!ReadVarint(&size) || size >= INT32_MAX || size > static_cast<uint64_t>(end_ - at_)) return false;
    *bytes = Bytes(reinterpret_cast<const char*>(at_), size);
    at_ += size;
    return true;
  }

  // Skips the value of a field whose tag was read. `depth` is the number of further levels of groups that are allowed.
  bool Skip(Tag tag, int depth) {
    uint64_t ignored;
    Bytes bytes;
    switch (tag.type) {
      case kVarint:
        return ReadVarint(&ignored);
      case kFixed64:
        return Advance(8);
      case kDelimited:
        return ReadDelimited(&bytes);
      case kStartGroup:
        return SkipGroup(tag.field, depth - 1);
      case kFixed32:
        return Advance(4);
      default:
        return false;
    }
  }

 private:
  bool Advance(ptrdiff_t size) {
    if (end_ - at_ < size) return false;
    at_ += size;
    return true;
  }

  bool SkipGroup(uint32_t field, int depth) {
    if (depth < 0) return false;
    while (!done()) {
      Tag tag;
      if (!ReadTag(&tag)) return false;
      if (tag.type == kEndGroup) return tag.field == field;
      if (!Skip(tag, depth)) return false;
    }
    return false;
  }

  const uint8_t* at_;
  const uint8_t* end_;
};

// Returns true if `bytes` are UTF-8: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool IsUtf8(Bytes bytes);

}  // namespace tpu_graphs

#endif  // TPU_GRAPHS_HLO_CC_WIRE_H_
