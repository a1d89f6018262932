//! Loops that become vector instructions.

use pulp::{Arch, Simd, WithSimd};

/// A loop over floats, compiled once for every set of vector instructions.
///
/// This is a trait instead of a closure because `run`, and everything it calls, must be `#[inline(always)]` to be
/// compiled with those instructions.
pub(crate) trait Kernel {
    type Output;

    fn run(self) -> Self::Output;
}

/// Runs a kernel with the widest vector instructions that the processor has.
pub(crate) fn vectorized<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(avx512) = pulp::x86::V4::try_new() {
            return Simd::vectorize(avx512, Vectorized(kernel));
        }
        if let Some(avx2) = pulp::x86::V3::try_new() {
            return Simd::vectorize(avx2, Vectorized(kernel));
        }
    }
    Arch::new().dispatch(Vectorized(kernel))
}

struct Vectorized<K>(K);

impl<K: Kernel> WithSimd for Vectorized<K> {
    type Output = K::Output;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> K::Output {
        self.0.run()
    }
}
