//! Arithmetic in the field of the integers modulo 2^61 - 1, a prime.
//!
//! Sums and products of floats become sums and products there, without rounding, whatever their order. Functions that
//! are neither are *uninterpreted*: a hash of the function's name and its arguments stands for the value. Two programs
//! that are equal as expressions over such functions agree on all arguments; two that are not agree on random ones
//! with a probability of at most their degree over 2^61 (Schwartz and Zippel).

/// The modulus.
pub(super) const MODULUS: u64 = (1 << 61) - 1;

/// An element of the field, below [`MODULUS`].
pub(super) type Element = u64;

/// Returns the element that a sum of products is congruent to.
pub(super) fn reduce(value: u128) -> Element {
    // 2^61 is congruent to 1.
    let low = (value as u64) & MODULUS;
    let folded = low as u128 + (value >> 61);
    let folded = ((folded as u64) & MODULUS) + (folded >> 61) as u64;
    match folded >= MODULUS {
        true => folded - MODULUS,
        false => folded,
    }
}

pub(super) fn add(a: Element, b: Element) -> Element {
    let sum = a + b;
    match sum >= MODULUS {
        true => sum - MODULUS,
        false => sum,
    }
}

pub(super) fn neg(a: Element) -> Element {
    match a {
        0 => 0,
        a => MODULUS - a,
    }
}

pub(super) fn sub(a: Element, b: Element) -> Element {
    add(a, neg(b))
}

pub(super) fn mul(a: Element, b: Element) -> Element {
    reduce(u128::from(a) * u128::from(b))
}

pub(super) fn power(base: Element, mut exponent: u64) -> Element {
    let (mut square, mut result) = (base, 1);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = mul(result, square);
        }
        square = mul(square, square);
        exponent >>= 1;
    }
    result
}

/// Returns the inverse, by Fermat's little theorem; zero of zero.
pub(super) fn inverse(a: Element) -> Element {
    power(a, MODULUS - 2)
}

pub(super) fn div(a: Element, b: Element) -> Element {
    mul(a, inverse(b))
}

/// Returns the element of an integer.
pub(super) fn of_integer(value: i64) -> Element {
    let magnitude = reduce(u128::from(value.unsigned_abs()));
    match value < 0 {
        true => neg(magnitude),
        false => magnitude,
    }
}

/// Returns the element of a number: that of a fraction with a small denominator if the number is one as far as 52 bits
/// tell, as a third is; that of the root of a small integer, or of one over it, if the number is one as far as a 32-bit
/// float tells; and otherwise that of its bits, which are an integer times a power of two. Infinities and what is not a
/// number are constants of their own.
pub(super) fn of_number(value: f64) -> Element {
    if !value.is_finite() {
        return function("constant", &[value.to_bits()]);
    }
    if let Some(root) = of_root(value) {
        return root;
    }
    const LARGEST_DENOMINATOR: f64 = 65_536.0;
    let inverse_of = 1.0 / value;
    if value != 0.0 && inverse_of.abs() <= LARGEST_DENOMINATOR {
        let nearest = inverse_of.round();
        if nearest != 0.0 && 1.0 / nearest == value {
            return inverse(of_integer(nearest as i64));
        }
    }
    let bits = value.to_bits();
    let exponent = ((bits >> 52) & 0x7ff) as i64;
    let fraction = bits & ((1 << 52) - 1);
    let (mantissa, exponent) = match exponent {
        0 => (fraction, -1074),
        _ => (fraction | (1 << 52), exponent - 1075),
    };
    let scale = power(2, exponent.unsigned_abs());
    let scale = match exponent < 0 {
        true => inverse(scale),
        false => scale,
    };
    let magnitude = mul(mantissa, scale);
    match value < 0.0 {
        true => neg(magnitude),
        false => magnitude,
    }
}

/// Returns the element of a number that is the root of an integer that is no square, or one over it. Scores of attention
/// are divided by such a root, and Burn multiplies their gradient by one over it, rounded to 32 bits.
fn of_root(value: f64) -> Option<Element> {
    const LARGEST_SQUARE: f64 = 4_096.0;
    const ROUNDING: f64 = 2.0 * f32::EPSILON as f64;
    let size = value.abs();
    let root = if size < 1.0 { 1.0 / size } else { size };
    let square = (root * root).round();
    let nearest = square.sqrt();
    let is_root = square <= LARGEST_SQUARE
        && nearest.fract() != 0.0
        && (root - nearest).abs() <= ROUNDING * root;
    if !is_root {
        return None;
    }
    let element = function("root", &[square as u64]);
    let element = if size < 1.0 {
        inverse(element)
    } else {
        element
    };
    Some(if value < 0.0 { neg(element) } else { element })
}

/// Returns where an element is in the order by which comparisons and maxima are decided: that of the representatives
/// nearest to zero. Sums do not respect it.
pub(super) fn order(a: Element) -> i64 {
    match a > MODULUS / 2 {
        true => a as i64 - MODULUS as i64,
        false => a as i64,
    }
}

/// Returns the value of an uninterpreted function.
pub(super) fn function(name: &str, arguments: &[u64]) -> Element {
    let mut hash = Hash::named(name);
    arguments.iter().for_each(|argument| hash.write(*argument));
    hash.finish()
}

/// A hash of words.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hash(u64);

impl Hash {
    /// Begins with a name.
    pub(super) fn named(name: &str) -> Self {
        let mut hash = Self(0x9e37_79b9_7f4a_7c15);
        for chunk in name.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            hash.write(u64::from_le_bytes(word));
        }
        hash.write(name.len() as u64);
        hash
    }

    /// Adds a word, by the finalizer of SplitMix64 (Steele, Lea and Flood 2014), which is a bijection, and a product
    /// that makes the order of words count.
    pub(super) fn write(&mut self, word: u64) {
        let mut mixed = word.wrapping_add(self.0.wrapping_mul(0xd129_0d32_f2c1_b6a5));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.0 = self.0.rotate_left(23) ^ mixed ^ (mixed >> 31);
    }

    /// Returns the hash as an element.
    pub(super) fn finish(mut self) -> Element {
        self.write(0x2545_f491_4f6c_dd1d);
        reduce(u128::from(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inverses_and_numbers_are_exact() {
        for value in [1, 2, 3, 7, MODULUS - 1, MODULUS / 2] {
            assert_eq!(mul(value, inverse(value)), 1);
            assert_eq!(add(value, neg(value)), 0);
        }
        assert_eq!(mul(of_number(1.0 / 3.0), 3), 1);
        assert_eq!(mul(of_number(-0.1), 10), neg(1));
        assert_eq!(of_number(6.5), div(13, 2));
        assert_eq!(of_number(-3.0), of_integer(-3));
        assert_eq!(of_number(0.0), 0);
        assert_eq!(mul(of_number(2f64.powi(-40)), power(2, 40)), 1);
        assert_ne!(of_number(f64::INFINITY), of_number(f64::NEG_INFINITY));
    }

    #[test]
    fn sums_of_products_are_reduced() {
        let largest = u128::from(MODULUS - 1) * u128::from(MODULUS - 1);
        assert_eq!(reduce(largest), 1);
        assert_eq!(reduce(largest * 60), 60);
        assert_eq!(reduce(u128::from(MODULUS)), 0);
    }

    #[test]
    fn functions_differ_by_name_and_by_each_argument() {
        let values = [
            function("exp", &[1]),
            function("exp", &[2]),
            function("log", &[1]),
            function("exp", &[1, 2]),
            function("exp", &[2, 1]),
            function("exp", &[]),
        ];
        let distinct: std::collections::BTreeSet<_> = values.iter().collect();
        assert_eq!(distinct.len(), values.len());
    }
}
