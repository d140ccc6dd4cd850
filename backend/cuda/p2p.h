// Collectives of ranks that each have a GPU of their own and reach each other's memory: one kernel per
// rank and call, in which the ranks' blocks wait for each other.
//
// Staging: memory of every rank that all ranks read, in two halves; a call uses the half of its number's
// parity. Pad: memory of every rank that all ranks write, see Pad. Both are zero before the first call, and
// used by one kernel at a time: calls are ordered by a stream.
//
// Barriers are between blocks: block b of a rank waits for block b of every other rank and for nothing else.
// So block b may read only what blocks b have written, and all ranks must use the same number of blocks for
// a call. All of them must be able to run at once.
//
// All that changes from call to call is counted in the pad, by the kernels themselves: launching the same
// kernel with the same arguments again (a CUDA graph) is the next call. Two kernels of a rank that run at once, as a
// graph's replay and another call may where no stream orders them, would take one number: each puts its token into the
// pad before it takes any, and gives up if another's is there.
//
// When a half may be written: a block that has passed a barrier of call k knows that every rank has begun
// call k, hence ended call k - 1 and its reading of that call's half, which is that of call k + 1.
//
// Tensors that all ranks reach (transport/cuda/registered.py) are read where they lie, as if they had been staged
// there: nothing is, and there are no halves. What others read of a tensor is its rank's own again behind one more
// barrier. Nobody writes in another rank's.
//
// Nothing waits for ever. A block that gives up (deadline, a rank that asks for something else, the host
// says so, another block or rank has given up) skips the data, and the kernel ends. The first one of a rank
// to do so tells the host and the other ranks. From then on all calls end at once: the group is broken.
#pragma once
#include "reduce.h"

namespace c10d_custom {

namespace p2p {

constexpr u32 kMaxRanks = 16, kMaxBlocks = 64;
constexpr u32 kWords = 16 << 10;  // of one rank's input in another's pad, see Flagged

// A word's flag: that it was written, and the low 31 bits of its call's number. Those come round after 2^31 calls. So
// that no word of long ago passes for a new one, every kCleaned calls two calls in a row clear a half of the pad each.
constexpr u32 kFlag = 1u << 31, kCleaned = 1u << 30;

// Kinds of failure, shared with transport/cuda/p2p.py.
enum Kind : u32 {
  kNone = 0,
  kTimeout,   // peer's block did not come within the deadline
  kMismatch,  // peer's call with this number is another one
  kAborted,   // the host asked for it
  kPeer,      // peer gave up
  kAtOnce,    // two calls of this rank run at once
};

// What block b of rank r says to block b of another rank.
struct Signal {
  u64 flag;       // number of the barrier << 32 | fingerprint of the call
  double factor;  // PREMUL_SUM: r's; valid with the flag
};

struct Pad {
  // Of this rank: calls and barriers it has behind it, and blocks that are through with the call under way.
  u32 calls, barriers, through;
  u32 reported;  // a block has told the host and the ranks of a failure
  // Not 0: give up. Kind of the failure << 32 | the rank that reported it. Written by any rank.
  u64 failed;
  u32 owner;  // the token of the call under way, 0: none is
  u32 unused;
  u64 reserved[12];
  // Written by rank r: signal[s][b][r]. Barriers use the sets s in turn: a rank can be one barrier ahead of
  // another, not two, and so does not overwrite what has not been seen.
  Signal signal[2][kMaxBlocks][kMaxRanks];
  // Behind it: u64 word[2][ranks][kWords], written by rank r: word[h][r], see Flagged. Halves as of the staging.
};

// Words of the host's memory that the device reaches.
struct Record {
  u64 failure;  // written by the device, once: Kind << 56 | peer << 48 | Arguments::number
  // Written by the host: not 0 ends all waiting. Bit r: rank r is gone, and its memory may be: nothing more is written
  // there once this is seen. The highest bit is always set.
  u64 abort;
  u64 ended;  // written by the device: how many calls have ended, well or not
};

struct Arguments {
  Pad* pad[kMaxRanks];     // the pads and staging buffers of all ranks, as addresses of this one
  u8* staging[kMaxRanks];  // aligned to 16
  const u8* input;
  u8* output;  // may be input
  // AllGather: outputs, of which this rank's own may be input; ReduceScatter: inputs, of which that may be output.
  u8* part[kMaxRanks];
  u64 bytes;
  u64 half;  // bytes of half a staging buffer, a multiple of 16; 0: `staging` are the ranks' tensors
  // A multiple of 16. TwoShot: bytes of a rank's slice; ranks * slice >= bytes. ReduceScatter: of a part's place.
  u64 slice;
  Record* record;
  u64 timeout_ns;
  double factor;  // PREMUL_SUM: this rank's
  u32 rank, ranks;
  u32 fingerprint;  // of what must be the same on all ranks
  u32 unit;         // what all tensors are aligned to: 1, 2, 4, 8 or 16
  u32 token;        // not 0, and no other launch of this rank that may run at the same time has it
  u32 root;         // Broadcast
  u32 number;       // by which the host knows the call
};

// One thread's part in one call.
class Call {
 public:
  __device__ explicit Call(const Arguments& a)
      : first(16 * ((u64)blockIdx.x * blockDim.x + threadIdx.x)),
        step(16 * (u64)gridDim.x * blockDim.x),
        a_(a),
        own_(*a.pad[a.rank]) {}

  // Of every array, and on every rank, this thread does the Vector at `first`, that at `first` + `step`, and so on.
  const u64 first, step;

  // Whether the last Vector of `bytes` bytes is a part of one, and this thread's.
  __device__ bool owns(u64 bytes) const {
    return bytes % 16 != 0 && (u32)(bytes / 16) % (u32)(step / 16) == (u32)(first / 16);
  }

  // Whether the group is whole. To be asked first, by all threads of the block.
  C10D_COLD bool begin() {
    bool other = false;
    if (threadIdx.x == 0) {
      const u32 owner = exchange_if_zero(&own_.owner, a_.token);
      other = owner != 0 && owner != a_.token;
    }
    owns_ = !sync_block_or(other);
    if (!owns_) {
      if (threadIdx.x == 0) give_up(kAtOnce, a_.rank);
      return false;
    }
    number_ = own_.calls, barriers_ = own_.barriers;
    half_ = (number_ & 1 ? a_.half : 0);
    bool whole = true;
    if (threadIdx.x == 0) whole = !told();
    if (number_ % kCleaned < 2) {  // that of the next call, which no rank begins before a barrier of this one
      u64* const next = words(a_.rank, 0, number_ + 1);
      const u64 end = (u64)a_.ranks * kWords;
      for (u64 i = first / 16; i < end; i += step / 16) store_relaxed_system(next + i, 0);
    }
    return !sync_block_or(!whole);
  }

  // The k-th of the ranks from this one on, so that not all read the same one's memory; the last is this one.
  __device__ u32 after(u32 k) const { return a_.rank + k < a_.ranks ? a_.rank + k : a_.rank + k - a_.ranks; }

  // Whether tensors are staged, and not read where they lie.
  __device__ bool stages() const { return a_.half != 0; }

  __device__ u8* staging(u32 rank) const { return a_.staging[rank] + half_; }

  // Waits for this block of all ranks; what they wrote before it is visible after it. False: give up.
  __device__ bool barrier(bool with_factor) {
    arrive(with_factor);
    return gather();
  }

  // To be called last by those who have read what others had staged: that is free again behind it.
  __device__ void leave() {
    if (!stages()) barrier(false);
  }

  // The first half of a barrier, by which the other ranks see what this one calls.
  C10D_COLD void arrive(bool with_factor) {
    sync_block();
    signal_ = &own_.signal[++barriers_ & 1][blockIdx.x][0];
    const u64 flag = expected();
    for (u32 rank = threadIdx.x; rank < a_.ranks; rank += blockDim.x) {
      Signal& mine = a_.pad[rank]->signal[barriers_ & 1][blockIdx.x][a_.rank];
      if (with_factor) mine.factor = a_.factor;
      store_release_system(&mine.flag, flag);
    }
  }

  // The second half.
  C10D_COLD bool gather() {
    bool all = true;
    for (u32 rank = threadIdx.x; rank < a_.ranks; rank += blockDim.x) all = all && wait(rank);
    return !sync_block_or(!all);
  }

  // Into all other ranks' pads: the Vector at `offset` of this one's input.
  __device__ void send(u64 offset, const Vector& v) {
    const u64 flag = (u64)(number_ | kFlag) << 32;
#pragma unroll 1
    for (u32 k = 1; k < a_.ranks; ++k) {
      u64* const to = words(after(k), a_.rank, number_) + offset / 4;
      store_pair_relaxed_system(to, flag | v.word[0], flag | v.word[1]);
      store_pair_relaxed_system(to + 2, flag | v.word[2], flag | v.word[3]);
    }
  }

  // What a rank has sent from there, once it has come. False: give up.
  __device__ bool receive(u32 rank, u64 offset, Vector& v) {
    const u64* const from = words(a_.rank, rank, number_) + offset / 4;
    const u32 flag = number_ | kFlag;
    for (u32 look = 1;; ++look) {
      u64 low[2], high[2];
      load_pair_relaxed_system(from, low);
      load_pair_relaxed_system(from + 2, high);
      if (low[0] >> 32 == flag && low[1] >> 32 == flag && high[0] >> 32 == flag && high[1] >> 32 == flag) {
        v = {{(u32)low[0], (u32)low[1], (u32)high[0], (u32)high[1]}};
        return true;
      }
      if (look % kLooks == 0 && (calls_another(rank) || !patient(rank))) return false;
    }
  }

  // A rank's factor, after a barrier with factors and before the next.
  __device__ double factor(u32 rank) const { return signal_[rank].factor; }

  // To be called last.
  __device__ void end() {
    if (threadIdx.x != 0 || !owns_) return;
    if (add_acquire_release(&own_.through, 1) != gridDim.x - 1) return;
    own_.through = 0;
    own_.calls = number_ + 1;
    own_.barriers = barriers_;
    store_relaxed_system(&a_.record->ended, (u64)number_ + 1);
    store_release(&own_.owner, 0);
  }

 private:
  // So many looks at a flag for one at the clock and at the host's memory, which is far away.
  static constexpr u32 kLooks = 64;

  __device__ u64 expected() const { return (u64)barriers_ << 32 | a_.fingerprint; }

  // Where in a rank's pad lies what another sends it.
  __device__ u64* words(u32 rank, u32 sender, u32 number) const {
    return (u64*)(a_.pad[rank] + 1) + ((u64)(number & 1) * a_.ranks + sender) * kWords;
  }

  __device__ bool wait(u32 rank) {
    for (u32 look = 1;; ++look) {
      if (load_acquire_system(&signal_[rank].flag) == expected()) return true;
      if (calls_another(rank) || told()) return false;
      if (look % kLooks == 0 && !patient(rank)) return false;
    }
  }

  // Whether a rank has come to this barrier with another call; then this one gives up.
  __device__ bool calls_another(u32 rank) {
    const u64 seen = load_relaxed_system(&signal_[rank].flag);
    return seen >> 32 == barriers_ && seen != expected() && !give_up(kMismatch, rank);
  }

  // Whether to wait longer for a rank.
  C10D_COLD bool patient(u32 rank) {
    if (told()) return false;
    if (load_relaxed_system(&a_.record->abort) != 0) return give_up(kAborted, a_.rank);
    const u64 now = clock_ns();
    if (begun_ == 0) begun_ = now;
    return now - begun_ <= a_.timeout_ns || give_up(kTimeout, rank);
  }

  // Whether a rank has given up, this one among them.
  __device__ bool told() {
    const u64 failed = load_relaxed_system(&own_.failed);
    if (failed != 0) report(kPeer, (u32)failed);
    return failed != 0;
  }

  __device__ bool give_up(u32 kind, u32 peer) {
    if (report(kind, peer)) {
      const u64 gone = load_relaxed_system(&a_.record->abort);
      for (u32 rank = 0; rank < a_.ranks; ++rank) {
        if ((gone >> rank & 1) == 0) store_relaxed_system(&a_.pad[rank]->failed, (u64)kind << 32 | a_.rank);
      }
    }
    return false;
  }

  __device__ bool report(u32 kind, u32 peer) {
    if (add_acquire_release(&own_.reported, 1) != 0) return false;
    store_release_system(&a_.record->failure, (u64)kind << 56 | (u64)peer << 48 | a_.number);
    return true;
  }

  const Arguments& a_;
  Pad& own_;
  u32 number_ = 0, barriers_ = 0;
  u64 half_ = 0;       // where in the staging the call's begins
  bool owns_ = false;  // the pad
  u64 begun_ = 0;      // waiting, by the clock; 0: not yet
  Signal* signal_;
};

// Vectors of an array of `bytes` bytes that lies in memory as the caller has it: the last may be a part.
C10D_DEVICE u32 size_at(u64 offset, u64 bytes) { return bytes - offset < 16 ? (u32)(bytes - offset) : 16; }

C10D_DEVICE Vector read(const Arguments& a, const u8* input, u64 offset, u64 bytes) {
  const u32 size = size_at(offset, bytes);
  return a.unit == 16 && size == 16 ? load_vector(input + offset) : gather_vector(input + offset, a.unit, 0, size);
}
C10D_DEVICE void write(const Arguments& a, u8* output, u64 offset, u64 bytes, const Vector& v) {
  const u32 size = size_at(offset, bytes);
  if (a.unit == 16 && size == 16) {
    store_vector(output + offset, v);
  } else {
    scatter_vector(output + offset, a.unit, 0, size, v);
  }
}

// Of an input into staging memory, or of staging memory into an output. Staging memory is moved by whole Vectors.
struct Copy {
  u8* to;
  const u8* from;
  u64 bytes;
};

// Does this thread's part of `copies` copies, of(k) the k-th, none of which has more than `longest` bytes. kMoved loads
// are under way at once, of as many copies as there are: other ranks' memory is far away, and each has its own link.
template <bool kIsInput, class Of>
C10D_DEVICE void move(const Arguments& a, const Call& call, u32 copies, u64 longest, Of of) {
  constexpr u32 kMoved = 4;
  if (a.unit == 16) {
    u32 k = 0;
#pragma unroll 1
    for (u64 at = call.first; copies != 0 && at + 16 <= longest;) {
      Vector v[kMoved];
      u8* to[kMoved];
#pragma unroll
      for (u32 i = 0; i < kMoved; ++i) {
        const Copy copy = of(k);
        to[i] = at + 16 <= copy.bytes ? copy.to + at : nullptr;
        if (to[i] != nullptr) v[i] = load_vector(copy.from + at);
        if (++k == copies) k = 0, at += call.step;
      }
#pragma unroll
      for (u32 i = 0; i < kMoved; ++i) {
        if (to[i] != nullptr) store_vector(to[i], v[i]);
      }
    }
    if (a.bytes % 16 == 0) return;
  }
  // What is left: the parts of Vectors, or all.
#pragma unroll 1
  for (u32 k = 0; k < copies; ++k) {
    const Copy copy = of(k);
    u64 at = call.first;
    if (a.unit == 16) at = call.owns(copy.bytes) ? copy.bytes - copy.bytes % 16 : copy.bytes;
#pragma unroll 1
    for (; at < copy.bytes; at += call.step) {
      if constexpr (kIsInput) {
        store_vector(copy.to + at, read(a, copy.from, at, copy.bytes));
      } else {
        write(a, copy.to, at, copy.bytes, load_vector(copy.from + at));
      }
    }
  }
}

C10D_DEVICE void put(const Arguments& a, const Call& call, u8* staging, const u8* input) {
  if (call.stages()) move<true>(a, call, 1, a.bytes, [&](u32) { return Copy{staging, input, a.bytes}; });
}

// Folds this thread's Vectors of `bytes` bytes of all ranks' staging, which begin at `start`; done(offset, Vector) is
// given each of them. Two Vectors of each of four ranks are under way at once, or one, of a dtype of one byte.
template <class R, class Done>
C10D_DEVICE void fold_staged(const Arguments& a, const Call& call, u64 start, u64 bytes, Done done) {
  constexpr u32 kVectors = R::Format::kItems < 16 ? 2 : 1;
#pragma unroll 1
  for (u64 at = call.first; at < bytes; at += kVectors * call.step) {
    Vector result[kVectors];
    const bool both = kVectors == 2 && at + call.step < bytes;
    fold_vectors<R, kVectors, 4>(
        result, a.ranks,
        [&](u32 j, Vector* in) {
          const u8* const from = call.staging(j) + start + at;
          in[0] = load_vector(from);
          if (both) in[kVectors - 1] = load_vector(from + call.step);
        },
        [&](u32 j) { return call.factor(j); });
    done(at, result[0]);
    if (both) done(at + call.step, result[kVectors - 1]);
  }
}

// Once all ranks have staged: the output is what begins at `start` there, of all of them.
template <class R>
C10D_DEVICE void reduce_staged(const Arguments& a, Call& call, u64 start) {
  if (!call.barrier(R::Operation::kScalesInput)) return;
  fold_staged<R>(a, call, start, a.bytes, [&](u64 at, const Vector& v) { write(a, a.output, at, a.bytes, v); });
  call.leave();
}

// A kernel, whose work<R>(arguments, call) is a thread's part in a group that is whole.
template <class Algorithm>
struct Kernel {
  using Arguments = p2p::Arguments;

  template <class R>
  C10D_DEVICE void run(const Arguments& a) {
    Call call(a);
    if (call.begin()) Algorithm::template work<R>(a, call);
    call.end();
  }
};

// For the smallest sizes: every rank sends its input to all others, four bytes in one word with a flag, so that who has
// seen the flag has the data: no fence, and nothing to wait for after the data. What makes halves safe and tells calls
// apart are the barrier's signals, sent before the data and awaited after it, when they have long been there. As NCCL's
// protocol LL (src/device/prims_ll.h), which trusts that two of four 32-bit stores come as one; a 64-bit access of a
// vector is one by PTX's memory model. Not for PREMUL_SUM, whose factors come with the signals.
struct Flagged : Kernel<Flagged> {
  template <class R>
  C10D_DEVICE void work(const Arguments& a, Call& call) {
    call.arrive(false);
#pragma unroll 1
    for (u64 at = call.first; at < a.bytes; at += call.step) call.send(at, read(a, a.input, at, a.bytes));
    bool whole = true;
#pragma unroll 1
    for (u64 at = call.first; at < a.bytes && whole; at += call.step) {
      Vector result[1];
      fold_vectors<R, 1, 4>(
          result, a.ranks,
          [&](u32 j, Vector* in) {
            if (j == a.rank) {
              in[0] = read(a, a.input, at, a.bytes);
            } else {
              in[0] = {};
              whole = whole && call.receive(j, at, in[0]);
            }
          },
          [](u32) { return 1.0; });
      if (whole) write(a, a.output, at, a.bytes, result[0]);
    }
    call.gather();
  }
};

// For small sizes: every rank stages its input, then reduces all of all ranks'.
struct OneShot : Kernel<OneShot> {
  template <class R>
  C10D_DEVICE void work(const Arguments& a, Call& call) {
    put(a, call, call.staging(a.rank), a.input);
    reduce_staged<R>(a, call, 0);
  }
};

// For large sizes: every rank stages its input, reduces its slice of all ranks' and leaves the result in
// that place of its own staging, which no other rank reads before; then it takes the other slices' results
// from the ranks that have them.
struct TwoShot : Kernel<TwoShot> {
  template <class R>
  C10D_DEVICE void work(const Arguments& a, Call& call) {
    const auto slice_of = [&](u32 rank, u8* to, const u8* from) {
      const u64 start = rank * a.slice, left = start < a.bytes ? a.bytes - start : 0;
      return Copy{to + start, from + start, left < a.slice ? left : a.slice};
    };
    u8* const staging = call.staging(a.rank);
    if (call.stages()) {
      move<true>(a, call, a.ranks, a.slice, [&](u32 k) { return slice_of(k, staging, a.input); });
    }
    if (!call.barrier(R::Operation::kScalesInput)) return;
    const Copy own = slice_of(a.rank, a.output, staging);
    fold_staged<R>(a, call, a.rank * a.slice, own.bytes, [&](u64 at, const Vector& v) {
      if (call.stages()) store_vector(staging + a.rank * a.slice + at, v);  // else it is the output
      write(a, own.to, at, own.bytes, v);
    });
    if (!call.barrier(false)) return;
    move<false>(a, call, a.ranks - 1, a.slice, [&](u32 k) {
      const u32 rank = call.after(k + 1);
      return slice_of(rank, a.output, call.staging(rank));
    });
    call.leave();
  }
};

// Every rank stages its inputs, one behind the other, then reduces those that are for it.
struct ReduceScatter : Kernel<ReduceScatter> {
  template <class R>
  C10D_DEVICE void work(const Arguments& a, Call& call) {
    u8* const staging = call.staging(a.rank);
    if (call.stages()) {
      move<true>(a, call, a.ranks, a.bytes, [&](u32 k) { return Copy{staging + k * a.slice, a.part[k], a.bytes}; });
    }
    reduce_staged<R>(a, call, a.rank * a.slice);
  }
};

// Every rank stages its input, then takes all ranks'. Of no dtype, as Broadcast: R is not used.
struct AllGather : Kernel<AllGather> {
  template <class R>
  C10D_DEVICE void work(const Arguments& a, Call& call) {
    put(a, call, call.staging(a.rank), a.input);
    if (!call.barrier(false)) return;
    move<false>(a, call, a.ranks, a.bytes, [&](u32 k) {
      const u32 rank = call.after(k + 1);
      return Copy{a.part[rank], call.staging(rank), a.part[rank] != a.input ? a.bytes : 0};
    });
    call.leave();
  }
};

// The root stages its input; the others take it.
struct Broadcast : Kernel<Broadcast> {
  template <class R>
  C10D_DEVICE void work(const Arguments& a, Call& call) {
    if (a.rank == a.root) put(a, call, call.staging(a.rank), a.input);
    if (!call.barrier(false)) return;
    const u32 copies = a.rank != a.root;
    move<false>(a, call, copies, a.bytes, [&](u32) { return Copy{a.output, call.staging(a.root), a.bytes}; });
    call.leave();
  }
};

}  // namespace p2p

using p2p::AllGather, p2p::Broadcast, p2p::Flagged, p2p::OneShot, p2p::ReduceScatter, p2p::TwoShot;

}  // namespace c10d_custom
