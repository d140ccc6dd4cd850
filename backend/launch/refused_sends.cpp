// MPICH over UCX, and a send to a process that is gone. UCX refuses the send once the connection is lost; MPICH (5.0.2)
// then writes to the request that it did not get, and the sender crashes. That can be any rank of a job, in the moment
// after the death of another and before it has heard of it, also amid MPI's own making of a communicator.
//
// So libmpi's two calls that send go by functions of ours, which say "sent" where UCX says that the connection is lost:
// nobody is there to receive it, and who has died is found out by other means (transport/hosts/failure_detector.py).
// They are put into libmpi's table of the functions that it calls (its procedure linkage table); nobody else's calls of
// UCX change.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <iterator>

#include "../shm/api.h"

namespace {

// UCX's, of which libmpi hands through what it gets: an address, null for "sent", or a status as an address.
using Send = void* (*)(void* endpoint, const void* data, size_t count, uint64_t tag, const void* options);

// UCX's statuses (ucs/type/status.h) that mean that there is no connection any more.
bool connection_lost(const void* answer) {
  const auto status = intptr_t(answer);
  constexpr int kUnreachable = -6, kCanceled = -16, kTimedOut = -20, kRejected = -23, kNotConnected = -24, kReset = -25;
  constexpr int kFirstLinkFailure = -40, kLastEndpointFailure = -89;
  for (const int lost : {kUnreachable, kCanceled, kTimedOut, kRejected, kNotConnected, kReset}) {
    if (status == lost) return true;
  }
  return status <= kFirstLinkFailure && status >= kLastEndpointFailure;
}

constexpr const char* kNames[] = {"ucp_tag_send_nbx", "ucp_tag_send_sync_nbx"};
std::atomic<Send> sends[std::size(kNames)];  // UCX's own

template <size_t I>
void* send(void* endpoint, const void* data, size_t count, uint64_t tag, const void* options) {
  void* answer = sends[I].load(std::memory_order_relaxed)(endpoint, data, count, tag, options);
  return connection_lost(answer) ? nullptr : answer;
}

constexpr Send kOurs[] = {send<0>, send<1>};

void replace(Send* entry, Send by) {
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
  void* const begin = reinterpret_cast<void*>(uintptr_t(entry) & ~(page - 1));
  // Writable as it is, unless the library was linked to have its table filled at once and then protected.
  if (mprotect(begin, page, PROT_READ | PROT_WRITE)) return;
  __atomic_store_n(entry, by, __ATOMIC_RELEASE);
}

// What a library calls of others, as its dynamic section tells. glibc has made its addresses absolute.
struct Calls {
  const char* names = nullptr;
  const ElfW(Sym) * symbols = nullptr;
  const ElfW(Rela) * entries = nullptr;
  size_t bytes = 0;

  explicit Calls(const link_map& library) {
    for (const ElfW(Dyn)* d = library.l_ld; d && d->d_tag != DT_NULL; ++d) {
      const auto address = d->d_un.d_ptr;
      if (d->d_tag == DT_STRTAB) names = reinterpret_cast<decltype(names)>(address);
      if (d->d_tag == DT_SYMTAB) symbols = reinterpret_cast<decltype(symbols)>(address);
      if (d->d_tag == DT_JMPREL) entries = reinterpret_cast<decltype(entries)>(address);
      if (d->d_tag == DT_PLTRELSZ) bytes = d->d_un.d_val;
    }
  }
};

}  // namespace

// ``function``: one of libmpi's. Nothing where that library does not send by UCX.
C10D_API void c10d_survive_refused_sends(const void* function) {
  Dl_info info;
  void* found = nullptr;
  if (!dladdr1(function, &info, &found, RTLD_DL_LINKMAP) || !found) return;
  const auto& library = *static_cast<const link_map*>(found);
  void* const handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);  // which finds its dependencies' functions, too
  if (!handle) return;
  const Calls calls(library);
  for (size_t n = 0; calls.names && calls.symbols && n < calls.bytes / sizeof *calls.entries; ++n) {
    const auto& entry = calls.entries[n];
    const char* name = calls.names + calls.symbols[ELF64_R_SYM(entry.r_info)].st_name;
    for (size_t i = 0; i < std::size(kNames); ++i) {
      if (strcmp(name, kNames[i])) continue;
      if (const auto own = reinterpret_cast<Send>(dlsym(handle, name))) {
        sends[i].store(own);
        replace(reinterpret_cast<Send*>(library.l_addr + entry.r_offset), kOurs[i]);
      }
    }
  }
  dlclose(handle);
}
