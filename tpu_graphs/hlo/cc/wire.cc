#include "wire.h"

#include <cstring>

namespace tpu_graphs {

bool IsUtf8(Bytes bytes) {
  const auto* at = reinterpret_cast<const uint8_t*>(bytes.data());
  const uint8_t* const end = at + bytes.size();
  while (at != end) {
    if (end - at >= 8) {  // Most names are ASCII: eight bytes at a time.
      uint64_t word;
      std::memcpy(&word, at, sizeof word);
      if (!(word & 0x8080808080808080u)) {
        at += 8;
        continue;
      }
    }
    const uint8_t lead = *at;
    if (lead < 0x80) {
      ++at;
      continue;
    }
    const int length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || end - at < length) return false;
    // The range of the second byte depends on the first; all others are 80 to BF.
    const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (at[1] < low || at[1] > high) return false;
    for (int i = 2; i < length; ++i) {
      if (at[i] < 0x80 || at[i] > 0xbf) return false;
    }
    at += length;
  }
  return true;
}

}  // namespace tpu_graphs
