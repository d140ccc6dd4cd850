// Memory files (memfd): how they are made and mapped, and how their pages are taken and given back.
//
// A page that is first touched where there is no memory is a SIGBUS, or the end of the process by the OOM killer. So
// pages are taken before they are touched, with an error where there are none.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <functional>

namespace c10d_custom {

// Bytes of one of this machine's pages: 4 KiB on x86-64, also 16 or 64 KiB on aarch64. What is mapped begins at a
// multiple of it, in the file too.
uint64_t page_bytes();

// Asked between two pieces of a few MiB; false: enough of it.
using GoesOn = std::function<bool()>;

// Takes memory for `bytes` of the file from `from` on, which this process has mapped at `at`; what has some already
// keeps it, and its contents. 0; ENOMEM where the machine or a cgroup has not so much left, and something for the
// program besides; ECANCELED where `goes_on` said so; or fallocate's errno. After an error some of it may have been
// taken.
int take_pages(int fd, uint64_t from, char* at, uint64_t bytes, const GoesOn& goes_on = nullptr);

// Gives the memory back: zeros from then on.
void give_back_pages(int fd, uint64_t from, char* at, uint64_t bytes);

// Shared, to be read and written; MAP_FAILED and errno, as mmap. Its pages do not become real before they are touched,
// also in a program that has called mlockall(MCL_FUTURE), nor are they locked in memory.
void* map_pages(int fd, uint64_t from, uint64_t bytes);

}  // namespace c10d_custom
