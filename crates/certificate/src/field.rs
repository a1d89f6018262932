//! Arithmetic in the field of the integers modulo 2^61 - 1, a prime.
//!
//! Sums and products of floats are computed in the field, without rounding, regardless of their order. All other
//! functions are *uninterpreted*: a hash of the function's name and its arguments represents the value. Two programs
//! that are the same expression over such functions agree on all arguments. Two different expressions agree on random
//! arguments with a probability of at most their degree over 2^61 (Schwartz and Zippel).

pub(super) use burn_fsdp_mesh::field::{
    Element, MODULUS, add, div, inverse, mul, neg, of_integer, power, reduce, sub,
};

use burn_fsdp_mesh::field;

/// Returns the element that represents a number.
///
/// - A number that equals a fraction with a small denominator to 52 bits becomes that fraction (for example a third).
/// - A number within 32-bit precision of the root of a small integer, or of its reciprocal, becomes that root or
///   reciprocal.
/// - Any other finite number is used exactly, as an integer times a power of two.
/// - Infinities and NaNs are separate constants.
pub(super) fn of_number(value: f64) -> Element {
    if !value.is_finite() {
        return function("constant", &[value.to_bits()]);
    }
    if let Some(root) = of_root(value) {
        return root;
    }
    field::of_number(value)
}

/// Returns the element of a number that is the root of a non-square integer, or the reciprocal of such a root.
/// Attention scores are divided by a root, and Burn multiplies their gradient by the reciprocal, rounded to 32 bits.
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

/// Returns the representative of an element that is nearest to zero. Comparisons and maxima order elements by it,
/// although sums do not preserve this order.
pub(super) fn order(a: Element) -> i64 {
    if a > MODULUS / 2 {
        a as i64 - MODULUS as i64
    } else {
        a as i64
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
    /// Creates a hash that begins with a name.
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

    /// Adds a word. The finalizer of SplitMix64 (Steele, Lea and Flood 2014), a bijection, mixes the word. Multiplying
    /// the previous state makes the hash depend on the order of words.
    pub(super) fn write(&mut self, word: u64) {
        let mut mixed = word.wrapping_add(self.0.wrapping_mul(0xd129_0d32_f2c1_b6a5));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.0 = self.0.rotate_left(23) ^ mixed ^ (mixed >> 31);
    }

    /// Returns the hash as an element of the field.
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
