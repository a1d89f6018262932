//! The norm of all gradients of a module, and clipping by it.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn_fsdp_collectives::{BufferPool, ElementType, FullPart, ProcessGroup, Reduction, Source};
use burn_fsdp_mesh::{Clip, Measure, Norm};
use burn_fsdp_tensors::is_host;

use crate::error::Error;
use crate::inspect;
use crate::optim::gradients::{self, Entry, Share};
use crate::optim::measured::contributions;

/// The result of [`clip_grad_norm`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Clipped {
    /// The gradients after clipping.
    pub gradients: GradientsParams,
    /// The norm of all gradients before clipping, the same on all ranks.
    pub total_norm: f64,
    /// The factor by which the gradients were multiplied: `max_norm / (total_norm + 1e-6)`, at most 1.
    pub coefficient: f64,
}

/// Returns the norm of all gradients of a sharded module, taken as one vector. It is the same on all ranks.
///
/// Each parameter counts once: all elements of a sharded parameter, and rank 0's gradient of an unmanaged parameter.
/// Without any gradient the norm is 0.
///
/// Collective over all ranks of the module, between steps: one all-reduce of one number for each group over which
/// parameters are sharded, and one more over all ranks if gradients are on a device other than the CPU. There, norms are
/// computed in the gradients' type, at least 32 bits.
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
    let measure = Measure::new(norm).ok_or_else(|| Error::Option {
        option: "norm",
        expected: "an order of at least 1, or Norm::Infinity",
        got: match norm {
            Norm::P(p) => p.to_string(),
            Norm::Infinity => "infinity".to_owned(),
        },
    })?;
    let reduction = if measure.is_largest() {
        Reduction::max()
    } else {
        Reduction::sum()
    };
    for root in inspect::roots_of(module)? {
        root.expect_between_steps()?;
    }
    let root = inspect::root_of(module)?;
    let groups = gradients::groups(module, &root.group);
    let mut everywhere = 0.0;
    let mut by_group = vec![0.0; groups.len()];
    let entries = gradients::entries(module, gradients);
    for (entry, own) in entries.iter().zip(contributions(measure, &entries)) {
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
    let mut is_computed_on_a_device = false;
    let own_is = entries.iter().any(|entry| !is_host(&entry.flat.device()));
    for (group, own) in groups.iter().zip(by_group) {
        let reduced = all_reduce(group, own, reduction, own_is)?;
        total = measure.join(total, reduced.number);
        is_computed_on_a_device |= reduced.is_any;
    }
    if is_computed_on_a_device {
        // Devices may round differently, and then ranks would scale the same gradients by different factors.
        let of_first = if root.group.rank() == 0 { total } else { 0.0 };
        total = all_reduce(&root.group, of_first, reduction, true)?.number;
    }
    Ok(measure.root(total))
}

/// Scales all gradients of a sharded module to limit their total norm as `clip` specifies, and returns them with the
/// norm before clipping. Clip after [`backward`](crate::backward) and before the optimizer's step; in half precision,
/// also after [`LossScaler::unscale`](crate::LossScaler::unscale).
///
/// Burn's own gradient clipping by norm clips each shard separately, which
/// [`check_elementwise`](crate::check_elementwise) rejects. See [`grad_norm`] for the gradients that count.
///
/// Collective over all ranks of the module, between steps: the all-reduces of [`grad_norm`].
///
/// # Errors
///
/// As [`grad_norm`]; [`Error::Option`] for a `max_norm` that is negative or not a number;
/// [`Error::NonFiniteNorm`] if requested.
pub fn clip_grad_norm<M: Module>(
    module: &M,
    gradients: GradientsParams,
    clip: Clip,
) -> Result<Clipped, Error> {
    if clip.max_norm().is_nan() || clip.max_norm() < 0.0 {
        return Err(Error::Option {
            option: "max_norm",
            expected: "a nonnegative number",
            got: clip.max_norm().to_string(),
        });
    }
    let total_norm = grad_norm(module, &gradients, clip.measured())?;
    if clip.refuses_nonfinite() && !total_norm.is_finite() {
        return Err(nonfinite(module, &gradients, total_norm));
    }
    let coefficient = clip.coefficient(total_norm);
    // A factor of 1 changes nothing. A NaN must propagate.
    let gradients = if coefficient == 1.0 {
        gradients
    } else {
        gradients::scaled(module, gradients, coefficient)?
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
    let largest = contributions(Measure::Largest, &entries);
    let mut pairs = entries.iter().zip(largest);
    let first = pairs.find(|(_, largest)| !largest.is_finite());
    Error::NonFiniteNorm {
        norm,
        rank,
        first: first.map_or_else(
            || "none, but another rank has one".to_owned(),
            |(entry, _)| format!("`{}`", entry.path),
        ),
    }
}

/// Returns true if this rank's elements of these gradients are all finite.
pub(super) fn are_finite(entries: &[Entry]) -> bool {
    let largest = contributions(Measure::Largest, entries);
    largest.into_iter().all(f64::is_finite)
}

/// A number that ranks have reduced.
pub(super) struct Reduced {
    pub(super) number: f64,
    /// True if a rank has set its flag.
    pub(super) is_any: bool,
}

/// Reduces one number over the ranks of `group`, and tells whether any rank sets `flag`.
pub(super) fn all_reduce(
    group: &ProcessGroup,
    number: f64,
    reduction: Reduction,
    flag: bool,
) -> Result<Reduced, Error> {
    let part = FullPart::new(Source::new(number.to_ne_bytes()), ElementType::F64);
    let into = BufferPool::new().take(size_of::<f64>());
    let received = group.all_reduce(
        "norm of the gradients",
        vec![u8::from(flag)],
        reduction,
        vec![part],
        vec![into],
    )?;
    let mut bytes = [0; size_of::<f64>()];
    bytes.copy_from_slice(received.buffers[0].as_ref());
    Ok(Reduced {
        number: f64::from_ne_bytes(bytes),
        is_any: received.notes.iter().any(|note| note == &[1]),
    })
}
