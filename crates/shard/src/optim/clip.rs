//! The norm of all gradients of a module, and clipping by it.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_fsdp_collectives::{BufferPool, ElementType, FullPart, ProcessGroup, Reduction, Source};

use crate::error::Error;
use crate::inspect;
use crate::optim::gradients::{self, Entry, Share};
use crate::transport;

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
    /// [`Error::NonFiniteNorm`], on all ranks.
    Refuse,
}

/// The options of [`clip_grad_norm`].
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
}

/// The result of [`clip_grad_norm`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Clipped {
    /// The gradients, scaled where needed.
    pub gradients: GradientsParams,
    /// The norm of all gradients before, the same on all ranks.
    pub total_norm: f64,
    /// The factor by which they were multiplied: `max_norm / (total_norm + 1e-6)`, at most 1.
    pub coefficient: f64,
}

/// Returns the norm of all gradients of a sharded module taken as one vector, the same on all ranks.
///
/// Each parameter counts once: of a sharded one the elements of all ranks, of one kept whole those
/// that every rank holds alike, of a parameter that no unit manages the gradient of rank 0. Without
/// any gradient it is 0.
///
/// Collective over all ranks of the module, between steps: one all-reduce of one number for each
/// group that parameters are sharded over.
///
/// # Errors
///
/// [`Error::NotSharded`]; [`Error::Option`] for an order below 1; [`Error::State`] inside a backward,
/// and while a forward waits for its backward; a failed collective.
pub fn grad_norm<M: Module>(
    module: &M,
    gradients: &GradientsParams,
    norm: Norm,
) -> Result<f64, Error> {
    let measure = Measure::new(norm)?;
    for root in inspect::roots_of(module)? {
        root.expect_between_steps()?;
    }
    let root = inspect::root_of(module)?;
    let groups = gradients::groups(module, &root.group);
    let mut everywhere = 0.0;
    let mut by_group = vec![0.0; groups.len()];
    for entry in gradients::entries(module, gradients) {
        let own = measure.of(&entry.flat);
        let group = match &entry.share {
            Share::Everywhere => {
                everywhere = measure.join(everywhere, own);
                continue;
            }
            Share::Shard(group) => group,
            Share::Local if root.group.rank() == 0 => &root.group,
            Share::Local => continue,
        };
        let index = groups
            .iter()
            .position(|known| gradients::is_same(known, group));
        let sum = &mut by_group[index.expect("a property of the module")];
        *sum = measure.join(*sum, own);
    }
    let mut total = everywhere;
    for (group, own) in groups.iter().zip(by_group) {
        total = measure.join(total, all_reduce(group, own, measure.reduction())?);
    }
    Ok(measure.root(total))
}

/// Scales all gradients of a sharded module so that their norm, taken as one vector, is at most
/// `clip`'s, and returns them with the norm that they had. Clip after
/// [`backward`](crate::backward) and, in half precision, after
/// [`LossScaler::unscale`](crate::LossScaler::unscale), before the optimizer's step.
///
/// Burn's own gradient clipping by norm clips each shard by itself, which
/// [`check_elementwise`](crate::check_elementwise) refuses. See [`grad_norm`] for what is counted.
///
/// Collective over all ranks of the module, between steps: the all-reduces of [`grad_norm`].
///
/// # Errors
///
/// As [`grad_norm`]; [`Error::Option`] for a `max_norm` that is negative or not a number;
/// [`Error::NonFiniteNorm`] if asked for.
pub fn clip_grad_norm<M: Module>(
    module: &M,
    gradients: GradientsParams,
    clip: Clip,
) -> Result<Clipped, Error> {
    if clip.max_norm.is_nan() || clip.max_norm < 0.0 {
        return Err(Error::Option {
            option: "max_norm",
            expected: "a number that is not negative",
            got: clip.max_norm.to_string(),
        });
    }
    let total_norm = grad_norm(module, &gradients, clip.norm)?;
    if clip.nonfinite == NonFinite::Refuse && !total_norm.is_finite() {
        return Err(nonfinite(module, &gradients, total_norm));
    }
    let coefficient = (clip.max_norm / (total_norm + EPSILON)).clamp(0.0, 1.0);
    // By 1 nothing changes; a NaN is to show.
    let gradients = match coefficient == 1.0 {
        true => gradients,
        false => gradients::scaled(module, gradients, coefficient),
    };
    Ok(Clipped {
        gradients,
        total_norm,
        coefficient,
    })
}

fn nonfinite<M: Module>(module: &M, gradients: &GradientsParams, norm: f64) -> Error {
    let rank = inspect::root_of(module).map_or(0, |root| root.group.rank());
    let entries = gradients::entries(module, gradients);
    let first = entries.into_iter().find(|entry| !is_finite(entry));
    Error::NonFiniteNorm {
        norm,
        rank,
        first: first.map_or_else(
            || "none of this rank's elements, but another's".to_owned(),
            |entry| format!("`{}`", entry.path),
        ),
    }
}

/// Returns true if all elements of a gradient on this rank are finite.
pub(crate) fn is_finite(entry: &Entry) -> bool {
    Measure::Largest.of(&entry.flat).is_finite()
}

/// Combines one number of each rank.
pub(crate) fn all_reduce(
    group: &ProcessGroup,
    number: f64,
    reduction: Reduction,
) -> Result<f64, Error> {
    let part = FullPart::new(Source::new(number.to_ne_bytes()), ElementType::F64);
    let into = BufferPool::new().take(size_of::<f64>());
    let received = group.all_reduce(
        "norm of the gradients",
        Vec::new(),
        reduction,
        vec![part],
        vec![into],
    )?;
    let mut bytes = [0; size_of::<f64>()];
    bytes.copy_from_slice(received.buffers[0].as_ref());
    Ok(f64::from_ne_bytes(bytes))
}

/// The number that each element contributes to a norm.
#[derive(Debug, Clone, Copy)]
enum Measure {
    Absolute,
    Square,
    Power(f64),
    Largest,
}

impl Measure {
    fn new(norm: Norm) -> Result<Self, Error> {
        match norm {
            Norm::Infinity => Ok(Self::Largest),
            Norm::P(f64::INFINITY) => Ok(Self::Largest),
            Norm::P(1.0) => Ok(Self::Absolute),
            Norm::P(2.0) => Ok(Self::Square),
            Norm::P(p) if p >= 1.0 => Ok(Self::Power(p)),
            Norm::P(p) => Err(Error::Option {
                option: "norm",
                expected: "an order of at least 1, or Norm::Infinity",
                got: p.to_string(),
            }),
        }
    }

    fn of(self, flat: &Tensor<1>) -> f64 {
        match self {
            Self::Absolute => fold(flat, |sum, x| sum + x.abs(), |a, b| a + b),
            Self::Square => fold(flat, |sum, x| sum + x * x, |a, b| a + b),
            Self::Power(p) => fold(flat, |sum, x| sum + x.abs().powf(p), |a, b| a + b),
            Self::Largest => fold(flat, |max, x| larger(max, x.abs()), larger),
        }
    }

    fn join(self, one: f64, other: f64) -> f64 {
        match self {
            Self::Largest => larger(one, other),
            Self::Absolute | Self::Square | Self::Power(_) => one + other,
        }
    }

    fn reduction(self) -> Reduction {
        match self {
            Self::Largest => Reduction::max(),
            Self::Absolute | Self::Square | Self::Power(_) => Reduction::sum(),
        }
    }

    fn root(self, total: f64) -> f64 {
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

/// Folds the elements, in an order that depends on their number alone. Burn's own sums over many
/// elements are shared among threads and need not add up in the same order twice.
fn fold(flat: &Tensor<1>, step: impl Fn(f64, f64) -> f64, join: impl Fn(f64, f64) -> f64) -> f64 {
    let flat = match flat.dtype() {
        DType::F32 | DType::F64 => flat.clone(),
        _ => flat.clone().cast(FloatDType::F32),
    };
    let is_double = flat.dtype() == DType::F64;
    let source = transport::source(flat, None);
    let bytes = source.as_bytes();
    match is_double {
        true => fold_bytes::<8>(bytes, f64::from_ne_bytes, step, join),
        false => fold_bytes::<4>(bytes, |x| f64::from(f32::from_ne_bytes(x)), step, join),
    }
}

fn fold_bytes<const SIZE: usize>(
    bytes: &[u8],
    read: impl Fn([u8; SIZE]) -> f64,
    step: impl Fn(f64, f64) -> f64,
    join: impl Fn(f64, f64) -> f64,
) -> f64 {
    let (elements, _) = bytes.as_chunks::<SIZE>();
    let mut total = 0.0;
    for chunk in elements.chunks(CHUNK) {
        let mut lanes = [0.0; LANES];
        let (blocks, rest) = chunk.as_chunks::<LANES>();
        for block in blocks {
            for (lane, element) in lanes.iter_mut().zip(block) {
                *lane = step(*lane, read(*element));
            }
        }
        for (lane, element) in lanes.iter_mut().zip(rest) {
            *lane = step(*lane, read(*element));
        }
        total = lanes.into_iter().fold(total, &join);
    }
    total
}
