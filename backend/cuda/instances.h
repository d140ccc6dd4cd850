// Which reductions there are: dtype_NAME::OP names a dtype of python/c10d_custom/dtypes.py under a reduce
// op. A pair without a meaning has no such member. Dtypes that reduce alike share one type.
#pragma once
#include "formats.h"
#include "operations.h"

namespace c10d_custom {

template <class F, class O>
struct Reduction {
  using Format = F;
  using Operation = O;
  using Item = typename F::Item;
};

// T: the type itself; U: the unsigned type of its width, in which wrapping is defined.
template <class T, class U, class Wide>
struct Integer {
  using SUM = Reduction<Native<U>, Sum>;
  using AVG = Reduction<Native<U>, IntAvg<T, Wide>>;
  using PRODUCT = Reduction<Native<U>, IntProduct>;
  using MIN = Reduction<Native<T>, Min>;
  using MAX = Reduction<Native<T>, Max>;
  using BAND = Reduction<Native<u32>, And>;
  using BOR = Reduction<Native<u32>, Or>;
  using BXOR = Reduction<Native<u32>, Xor>;
};

template <class Format>
struct Real {
  using SUM = Reduction<Format, Sum>;
  using AVG = Reduction<Format, FloatAvg>;
  using PRODUCT = Reduction<Format, Product>;
  using MIN = Reduction<Format, FloatMin>;
  using MAX = Reduction<Format, FloatMax>;
  using PREMUL_SUM = Reduction<Format, PremulSum>;
};

template <class Format>
struct Complex {
  using SUM = Reduction<Format, Sum>;
  using AVG = Reduction<Format, FloatAvg>;
  using PRODUCT = Reduction<Format, ComplexProduct>;
  using PREMUL_SUM = Reduction<Format, PremulSum>;
};

struct dtype_bool {
  using SUM = Reduction<Bool, Or>;
  using PRODUCT = Reduction<Bool, And>;
  using MIN = PRODUCT;
  using MAX = SUM;
  using BAND = PRODUCT;
  using BOR = SUM;
  using BXOR = Reduction<Bool, Xor>;
};

using dtype_uint8 = Integer<u8, u8, u32>;
using dtype_int8 = Integer<i8, u8, i32>;
using dtype_uint16 = Integer<u16, u16, u32>;
using dtype_int16 = Integer<i16, u16, i32>;
using dtype_uint32 = Integer<u32, u32, u32>;
using dtype_int32 = Integer<i32, u32, i64>;
using dtype_uint64 = Integer<u64, u64, u64>;
using dtype_int64 = Integer<i64, u64, i64>;
using dtype_float16 = Real<Packed<Float16Codec>>;
using dtype_bfloat16 = Real<Packed<Bfloat16Codec>>;
using dtype_float32 = Real<Native<float>>;
using dtype_float64 = Real<Native<double>>;
using dtype_complex32 = Complex<Packed<Float16Codec>>;
using dtype_complex64 = Complex<Native<float>>;
using dtype_complex128 = Complex<Native<double>>;
using dtype_float8_e4m3fn = Real<Packed<SmallFloatCodec<4, 3, 7, Specials::kFn>>>;
using dtype_float8_e5m2 = Real<Packed<SmallFloatCodec<5, 2, 15, Specials::kIeee>>>;
using dtype_float8_e4m3fnuz = Real<Packed<SmallFloatCodec<4, 3, 8, Specials::kFnuz>>>;
using dtype_float8_e5m2fnuz = Real<Packed<SmallFloatCodec<5, 2, 16, Specials::kFnuz>>>;
using dtype_bcomplex32 = Complex<Packed<Bfloat16Codec>>;

}  // namespace c10d_custom
