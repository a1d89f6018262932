//! The method of products of halves, chosen once per process.

use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use burn::tensor::bf16;

use crate::matrix::Matrix;
use crate::packed;

/// A method of computing products of halves (`bf16`).
///
/// The processor decides between instructions for halves, tiles and copies, because these methods round differently,
/// and ranks on equal processors must compute the same bits. Both kinds of tiles have the same bits. The first product
/// of a process measures which is faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HalfProducts {
    /// Instructions for halves (AVX512-BF16, or those of other architectures).
    Instructions,
    /// Widened panels in tiles of 6 rows and 16 columns, whose sums are in 12 registers of 8 floats.
    SmallTiles,
    /// Widened panels in tiles of 12 rows and 32 columns, whose sums are in 24 registers of 16 floats.
    LargeTiles,
    /// 32-bit products of widened copies, on processors without fused multiplications and additions.
    Copies,
}

impl HalfProducts {
    /// All methods.
    pub const ALL: [Self; 4] = [
        Self::Instructions,
        Self::SmallTiles,
        Self::LargeTiles,
        Self::Copies,
    ];

    /// Returns the method that this process uses. The first call takes a few milliseconds.
    pub fn chosen() -> Self {
        static CHOSEN: OnceLock<HalfProducts> = OnceLock::new();
        *CHOSEN.get_or_init(|| {
            if has_fast_halves() {
                Self::Instructions
            } else if has_fused_vectors() {
                fastest([Self::SmallTiles, Self::LargeTiles], time)
            } else {
                Self::Copies
            }
        })
    }
}

impl fmt::Display for HalfProducts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Instructions => "bf16 instructions",
            Self::SmallTiles => "32-bit tiles of 6 x 16",
            Self::LargeTiles => "32-bit tiles of 12 x 32",
            Self::Copies => "32-bit copies",
        })
    }
}

/// Returns true if this processor has instructions that multiply halves (AVX512-BF16) faster than 32-bit floats.
///
/// Processors with AMX also have AVX512-BF16, but their vector units multiply halves no faster than 32-bit floats.
#[cfg(target_arch = "x86_64")]
fn has_fast_halves() -> bool {
    /// Bit of `edx` in leaf 7 of the processor's identification: AMX-BF16.
    const AMX_BF16: u32 = 1 << 22;
    std::arch::is_x86_feature_detected!("avx512bf16")
        && std::arch::x86_64::__cpuid_count(7, 0).edx & AMX_BF16 == 0
}

#[cfg(not(target_arch = "x86_64"))]
fn has_fast_halves() -> bool {
    true
}

/// Returns true if vectors are multiplied and added in one instruction, without which tiles would be slow.
#[cfg(target_arch = "x86_64")]
fn has_fused_vectors() -> bool {
    pulp::x86::V3::try_new().is_some()
}

#[cfg(not(target_arch = "x86_64"))]
fn has_fused_vectors() -> bool {
    false
}

/// Returns the method with the shortest time, measured several times in alternation because other work disturbs it.
fn fastest<const N: usize>(
    methods: [HalfProducts; N],
    mut time: impl FnMut(HalfProducts) -> Duration,
) -> HalfProducts {
    const ROUNDS: usize = 5;
    let mut best = [Duration::MAX; N];
    for _ in 0..ROUNDS {
        for (best, method) in best.iter_mut().zip(methods) {
            *best = time(method).min(*best);
        }
    }
    let pairs = best.into_iter().zip(methods);
    let shortest = pairs.min_by_key(|(time, _)| *time);
    shortest.map_or(HalfProducts::SmallTiles, |(_, method)| method)
}

/// Returns the time of a product in tiles.
fn time(method: HalfProducts) -> Duration {
    const ROWS: usize = 96;
    const ADDENDS: usize = 256;
    const COLUMNS: usize = 256;
    let (left, right) = ([bf16::ONE; ROWS * ADDENDS], [bf16::ONE; ADDENDS * COLUMNS]);
    let lhs = Matrix::new(&left, [ROWS, ADDENDS], [ADDENDS, 1]);
    let rhs = Matrix::new(&right, [ADDENDS, COLUMNS], [COLUMNS, 1]);
    let mut sum = 0.0;
    let store = |_: usize, _: usize, halves: &[bf16]| sum += halves[0].to_f32();
    let begun = Instant::now();
    match method {
        HalfProducts::LargeTiles => packed::multiply::<12, 32>(lhs, rhs, store),
        _ => packed::multiply::<6, 16>(lhs, rhs, store),
    }
    std::hint::black_box(sum);
    begun.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_time_wins_in_spite_of_one_disturbance() {
        let mut calls = 0;
        let time = |method| {
            calls += 1;
            // The first measurement of the faster method is disturbed.
            let millis = match (method, calls) {
                (HalfProducts::LargeTiles, 2) => 9,
                (HalfProducts::LargeTiles, _) => 1,
                _ => 2,
            };
            Duration::from_millis(millis)
        };
        let methods = [HalfProducts::SmallTiles, HalfProducts::LargeTiles];
        assert_eq!(fastest(methods, time), HalfProducts::LargeTiles);
    }

    #[test]
    fn the_choice_is_fixed_and_suits_the_processor() {
        let chosen = HalfProducts::chosen();
        assert_eq!(chosen, HalfProducts::chosen());
        assert_eq!(chosen == HalfProducts::Instructions, has_fast_halves());
        let is_slow = !has_fast_halves() && !has_fused_vectors();
        assert_eq!(chosen == HalfProducts::Copies, is_slow);
    }
}
