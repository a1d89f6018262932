//! Arithmetic in the field of the integers modulo 2^61 - 1, a prime: sums, products and quotients without rounding.
//!
//! The eager engine and compiled steps use it to check how they process gradients. Each gradient is represented by a
//! random element. Two different expressions agree on it with a probability of at most their degree over 2^61 (Schwartz
//! and Zippel).
//!
//! ```
//! use burn_fsdp_mesh::field;
//!
//! let third = field::of_number(1.0 / 3.0);
//! assert_eq!(field::mul(third, 3), 1);
//! ```

/// The modulus of the field.
pub const MODULUS: u64 = (1 << 61) - 1;

/// An element of the field, below [`MODULUS`].
pub type Element = u64;

/// Returns the element that is congruent to `value`, such as a sum of products.
pub fn reduce(value: u128) -> Element {
    // 2^61 is congruent to 1.
    let low = (value as u64) & MODULUS;
    let folded = low as u128 + (value >> 61);
    let folded = ((folded as u64) & MODULUS) + (folded >> 61) as u64;
    if folded >= MODULUS {
        folded - MODULUS
    } else {
        folded
    }
}

/// Returns the sum.
pub fn add(a: Element, b: Element) -> Element {
    let sum = a + b;
    if sum >= MODULUS { sum - MODULUS } else { sum }
}

/// Returns the additive inverse of `a`.
pub fn neg(a: Element) -> Element {
    match a {
        0 => 0,
        a => MODULUS - a,
    }
}

/// Returns the difference.
pub fn sub(a: Element, b: Element) -> Element {
    add(a, neg(b))
}

/// Returns the product.
pub fn mul(a: Element, b: Element) -> Element {
    reduce(u128::from(a) * u128::from(b))
}

/// Returns `base` raised to `exponent`.
pub fn power(base: Element, mut exponent: u64) -> Element {
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

/// Returns the multiplicative inverse of `a`, by Fermat's little theorem. The inverse of zero is zero.
pub fn inverse(a: Element) -> Element {
    power(a, MODULUS - 2)
}

/// Returns the quotient. Division by zero returns zero.
pub fn div(a: Element, b: Element) -> Element {
    mul(a, inverse(b))
}

/// Returns the element that represents an integer.
pub fn of_integer(value: i64) -> Element {
    let magnitude = reduce(u128::from(value.unsigned_abs()));
    if value < 0 { neg(magnitude) } else { magnitude }
}

/// Returns the element that represents a finite number.
///
/// If the number is the `f64` nearest to `1 / n`, for `n` up to 65,536, the result is the inverse of `n`. Otherwise it
/// is the exact value: an integer times a power of two.
pub fn of_number(value: f64) -> Element {
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
    let scale = if exponent < 0 { inverse(scale) } else { scale };
    let magnitude = mul(mantissa, scale);
    if value < 0.0 {
        neg(magnitude)
    } else {
        magnitude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inverses_and_numbers_are_exact() {
        for value in [1, 2, 3, 7, MODULUS - 1, MODULUS / 2] {
            assert_eq!(mul(value, inverse(value)), 1);
            assert_eq!(div(mul(value, 5), value), 5);
            assert_eq!(add(value, neg(value)), 0);
            assert_eq!(sub(value, value), 0);
        }
        assert_eq!(mul(of_number(1.0 / 3.0), 3), 1);
        assert_eq!(of_number(2.0), 2);
        assert_eq!(mul(of_number(0.75), 4), 3);
        assert_eq!(of_number(-1.5), neg(of_number(1.5)));
        assert_eq!(of_number(0.0), 0);
        assert_eq!(power(2, 61), 1);
    }
}
