// Copies, word by word, of what others may be writing or reading at the same time. Each word read is one that was
// written, and marks set before and after the whole is written are seen in that order. (A fence would do, too, but the
// thread sanitizer knows none.)
#pragma once
#include <cstddef>
#include <cstdint>

namespace c10d_custom {

typedef uint64_t __attribute__((may_alias)) Word;

inline void store_words(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(Word); ++i)
    __atomic_store_n(static_cast<Word*>(to) + i, static_cast<const Word*>(from)[i], __ATOMIC_RELEASE);
}

inline void load_words(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(Word); ++i)
    static_cast<Word*>(to)[i] = __atomic_load_n(static_cast<const Word*>(from) + i, __ATOMIC_ACQUIRE);
}

}  // namespace c10d_custom
