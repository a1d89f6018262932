//! Exponentials of 32-bit floats, as vector instructions.

/// Below this, `exp` is treated as zero.
const SMALLEST_EXPONENT: f32 = -87.0;

/// Adding this rounds a small number to an integer, which is then in the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// `ln 2` in two parts; multiples of the first are exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// Returns `e^x` for `x <= 0`, to about one unit in the last place.
///
/// The code has no branches and no calls, so a loop over it becomes vector instructions. The polynomial is from the
/// Cephes library.
#[inline(always)]
fn exp_nonpositive(x: f32) -> f32 {
    // This form preserves NaN.
    let x = if x < SMALLEST_EXPONENT {
        SMALLEST_EXPONENT
    } else {
        x
    };
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let mut series = 1.987_569_1e-4;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        series = series * r + coefficient;
    }
    let exp_r = series * r * r + r + 1.0;
    // 2^n, built from its exponent bits with the bias 127.
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    exp_r * f32::from_bits(exponent.wrapping_add(127) << 23)
}

/// Returns `e^x` for `x <= 0`, or zero if the result is below about the smallest normal number. Masked elements
/// therefore contribute nothing to a sum, unless their factor is not finite.
#[inline(always)]
pub(crate) fn exp_or_zero(x: f32) -> f32 {
    let exp = exp_nonpositive(x);
    if x < SMALLEST_EXPONENT { 0.0 } else { exp }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_matches_the_standard_library() {
        for step in 0..870_000 {
            let x = step as f32 * -1e-4;
            let expected = f64::from(x).exp();
            let relative = (f64::from(exp_nonpositive(x)) / expected - 1.0).abs();
            assert!(relative < 2e-7, "exp({x}) is off by {relative}");
        }
    }

    #[test]
    fn exp_of_the_extremes() {
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert!(exp_nonpositive(f32::NEG_INFINITY) < 1e-37);
        assert!(exp_nonpositive(f32::NAN).is_nan());
    }
}
