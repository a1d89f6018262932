//! The norm of all gradients of a module, and what clipping by it asks for: numbers and choices that the eager engine
//! and compiled steps share.

/// Number of elements whose sum is a number of its own, added to the others in order: the result
/// does not depend on how the work is shared.
const CHUNK: usize = 1 << 16;
/// Number of sums kept side by side, so that additions need not wait for each other.
const LANES: usize = 8;
/// The number that PyTorch adds to a norm before dividing by it.
const EPSILON: f64 = 1e-6;

/// A vector norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Norm {
    /// `(sum |x|^p)^(1/p)`, with `p` at least 1. Computed in `f64`, without rescaling: `|x|^p` should
    /// lie within 1e-300 and 1e300.
    P(f64),
    /// The largest `|x|`.
    Infinity,
}

impl Default for Norm {
    /// Returns the Euclidean norm.
    fn default() -> Self {
        Self::P(2.0)
    }
}

/// The treatment of a norm that is infinite or not a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NonFinite {
    /// Scaling all the same, as PyTorch does by default: an infinite norm turns finite elements to
    /// zero, one that is not a number turns all to NaN.
    #[default]
    Scale,
    /// An error, on all ranks. The eager engine has changed nothing then; a compiled step has moved running statistics,
    /// and goes on from a checkpoint alone.
    Refuse,
}

/// The greatest norm that the gradients of a module may have, taken as one vector, and what is done with more.
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use]
pub struct Clip {
    max_norm: f64,
    norm: Norm,
    nonfinite: NonFinite,
}

impl Clip {
    /// Clips to a Euclidean norm of at most `max_norm`.
    pub fn to(max_norm: f64) -> Self {
        Self {
            max_norm,
            norm: Norm::default(),
            nonfinite: NonFinite::default(),
        }
    }

    /// Sets another norm.
    pub fn norm(mut self, norm: Norm) -> Self {
        self.norm = norm;
        self
    }

    /// Sets what to do with a norm that is not finite.
    pub fn nonfinite(mut self, nonfinite: NonFinite) -> Self {
        self.nonfinite = nonfinite;
        self
    }

    /// Returns the greatest norm that gradients may have.
    pub fn max_norm(&self) -> f64 {
        self.max_norm
    }

    /// Returns the norm that is measured.
    pub fn measured(&self) -> Norm {
        self.norm
    }

    /// Returns true if a norm that is not finite is refused.
    pub fn refuses_nonfinite(&self) -> bool {
        self.nonfinite == NonFinite::Refuse
    }

    /// Returns true if gradients can be clipped so: to a number that is not negative.
    pub fn is_valid(&self) -> bool {
        self.max_norm >= 0.0 && Measure::new(self.norm).is_some()
    }

    /// Returns the factor by which gradients of that norm are multiplied: `max_norm / (total_norm + 1e-6)`, at most 1,
    /// after PyTorch's `clip_grad_norm_`.
    pub fn coefficient(&self, total_norm: f64) -> f64 {
        (self.max_norm / (total_norm + EPSILON)).clamp(0.0, 1.0)
    }
}

/// The number that each element contributes to a norm, and how these numbers come together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Measure {
    /// The sum of absolute values.
    Absolute,
    /// The sum of squares.
    Square,
    /// The sum of that power of absolute values.
    Power(f64),
    /// The largest absolute value.
    Largest,
}

impl Measure {
    /// Returns the measure of a norm; `None` for an order below 1 or that is not a number.
    pub fn new(norm: Norm) -> Option<Self> {
        match norm {
            Norm::Infinity | Norm::P(f64::INFINITY) => Some(Self::Largest),
            Norm::P(1.0) => Some(Self::Absolute),
            Norm::P(2.0) => Some(Self::Square),
            Norm::P(p) => (p >= 1.0).then_some(Self::Power(p)),
        }
    }

    /// Returns the contribution of the 32-bit floats in these bytes, in an order that depends on their number alone.
    /// Burn's own sums over many elements are shared among threads and need not add up in the same order twice.
    pub fn of_f32(self, bytes: &[u8]) -> f64 {
        self.of(bytes, |x| f64::from(f32::from_ne_bytes(x)))
    }

    /// Returns the contribution of the 64-bit floats in these bytes, as [`of_f32`](Self::of_f32) does.
    pub fn of_f64(self, bytes: &[u8]) -> f64 {
        self.of(bytes, f64::from_ne_bytes)
    }

    fn of<const SIZE: usize>(self, bytes: &[u8], read: impl Fn([u8; SIZE]) -> f64) -> f64 {
        match self {
            Self::Absolute => fold(bytes, |sum, x| sum + read(x).abs(), |a, b| a + b),
            Self::Square => fold(bytes, |sum, x| sum + read(x) * read(x), |a, b| a + b),
            Self::Power(p) => fold(bytes, |sum, x| sum + read(x).abs().powf(p), |a, b| a + b),
            Self::Largest => fold(bytes, |max, x| larger(max, read(x).abs()), larger),
        }
    }

    /// Joins the contributions of two sets of elements.
    pub fn join(self, one: f64, other: f64) -> f64 {
        match self {
            Self::Largest => larger(one, other),
            Self::Absolute | Self::Square | Self::Power(_) => one + other,
        }
    }

    /// Returns true if contributions are joined by their maximum, and false if by their sum.
    pub fn is_largest(self) -> bool {
        self == Self::Largest
    }

    /// Returns the norm of all elements, of what they contribute together.
    pub fn root(self, total: f64) -> f64 {
        match self {
            Self::Absolute | Self::Largest => total,
            Self::Square => total.sqrt(),
            Self::Power(p) => total.powf(p.recip()),
        }
    }
}

/// Returns the larger, or NaN if one is.
fn larger(one: f64, other: f64) -> f64 {
    match one >= other || one.is_nan() {
        true => one,
        false => other,
    }
}

fn fold<const SIZE: usize>(
    bytes: &[u8],
    step: impl Fn(f64, [u8; SIZE]) -> f64,
    join: impl Fn(f64, f64) -> f64,
) -> f64 {
    let (elements, _) = bytes.as_chunks::<SIZE>();
    let mut total = 0.0;
    for chunk in elements.chunks(CHUNK) {
        let mut lanes = [0.0; LANES];
        let (blocks, rest) = chunk.as_chunks::<LANES>();
        for block in blocks {
            for (lane, element) in lanes.iter_mut().zip(block) {
                *lane = step(*lane, *element);
            }
        }
        for (lane, element) in lanes.iter_mut().zip(rest) {
            *lane = step(*lane, *element);
        }
        total = lanes.into_iter().fold(total, &join);
    }
    total
}
