//! The gradient norm of a module and the options for clipping by it, for the eager engine and compiled steps.

/// Number of elements in a partial sum. Partial sums are added in order, so the result does not depend on how the
/// work is divided.
const CHUNK: usize = 1 << 16;
/// Number of independent running sums, so additions need not wait for each other.
const LANES: usize = 8;
/// The number that PyTorch adds to a norm before dividing by it.
const EPSILON: f64 = 1e-6;

/// A vector norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Norm {
    /// `(sum |x|^p)^(1/p)`, with `p` at least 1. It is computed in `f64` without rescaling, so `|x|^p` should be
    /// between 1e-300 and 1e300.
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

/// The handling of an infinite or NaN norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NonFinite {
    /// Scales anyway, as PyTorch does by default. An infinite norm turns finite elements to zero, and a NaN norm
    /// turns all elements to NaN.
    #[default]
    Scale,
    /// Returns an error on all ranks. The eager engine leaves everything unchanged in this case. A compiled step has
    /// already updated running statistics, so training can only continue from a checkpoint.
    Refuse,
}

/// Options for clipping a module's gradients, taken as one vector, to a maximum norm.
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

    /// Sets the kind of norm.
    pub fn norm(mut self, norm: Norm) -> Self {
        self.norm = norm;
        self
    }

    /// Sets how an infinite or NaN norm is handled.
    pub fn nonfinite(mut self, nonfinite: NonFinite) -> Self {
        self.nonfinite = nonfinite;
        self
    }

    /// Returns the maximum norm of the gradients.
    pub fn max_norm(&self) -> f64 {
        self.max_norm
    }

    /// Returns the kind of norm that is limited.
    pub fn measured(&self) -> Norm {
        self.norm
    }

    /// Returns true if an infinite or NaN norm is an error.
    pub fn refuses_nonfinite(&self) -> bool {
        self.nonfinite == NonFinite::Refuse
    }

    /// Returns true if these options are valid: the maximum is not negative and the norm's order is at least 1.
    pub fn is_valid(&self) -> bool {
        self.max_norm >= 0.0 && Measure::new(self.norm).is_some()
    }

    /// Returns the factor that multiplies gradients with the norm `total_norm`: `max_norm / (total_norm + 1e-6)`, at
    /// most 1, as in PyTorch's `clip_grad_norm_`.
    pub fn coefficient(&self, total_norm: f64) -> f64 {
        (self.max_norm / (total_norm + EPSILON)).clamp(0.0, 1.0)
    }
}

/// Each element's contribution to a norm, and how contributions are combined.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Measure {
    /// The sum of absolute values.
    Absolute,
    /// The sum of squares.
    Square,
    /// The sum of the absolute values, each raised to this power.
    Power(f64),
    /// The largest absolute value.
    Largest,
}

impl Measure {
    /// Returns the measure of a norm, or `None` for an order that is below 1 or NaN.
    pub fn new(norm: Norm) -> Option<Self> {
        match norm {
            Norm::Infinity | Norm::P(f64::INFINITY) => Some(Self::Largest),
            Norm::P(1.0) => Some(Self::Absolute),
            Norm::P(2.0) => Some(Self::Square),
            Norm::P(p) => (p >= 1.0).then_some(Self::Power(p)),
        }
    }

    /// Returns the contribution of the 32-bit floats in these bytes. The order of additions depends only on the number
    /// of elements. Burn's own sums over many elements are divided among threads, so the order may differ each time.
    pub fn of_f32(self, bytes: &[u8]) -> f64 {
        self.of(bytes, |x| f64::from(f32::from_ne_bytes(x)))
    }

    /// Returns the contribution of the 64-bit floats in these bytes, like [`of_f32`](Self::of_f32).
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

    /// Combines the contributions of two sets of elements.
    pub fn join(self, one: f64, other: f64) -> f64 {
        match self {
            Self::Largest => larger(one, other),
            Self::Absolute | Self::Square | Self::Power(_) => one + other,
        }
    }

    /// Returns true if contributions are combined by their maximum, and false if they are summed.
    pub fn is_largest(self) -> bool {
        self == Self::Largest
    }

    /// Returns the norm, given the combined contribution of all elements.
    pub fn root(self, total: f64) -> f64 {
        match self {
            Self::Absolute | Self::Largest => total,
            Self::Square => total.sqrt(),
            Self::Power(p) => total.powf(p.recip()),
        }
    }
}

/// Returns the larger number, or NaN if one of them is NaN.
fn larger(one: f64, other: f64) -> f64 {
    if one >= other || one.is_nan() {
        one
    } else {
        other
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
