//! Activations that the user names, to request their placements.

use std::cell::RefCell;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn_fsdp_mesh::Pattern;

use super::capture::{Captured, float_id};
use crate::error::Error;

/// The activations named in a trace, in the order of the closure's calls.
pub(super) type Activations = Vec<(Arc<str>, Option<Captured>)>;

thread_local! {
    /// The names in the trace that runs on this thread; `None` outside of traces.
    static NAMED: RefCell<Option<Activations>> = const { RefCell::new(None) };
}

/// Names an activation and returns it unchanged. [`Expand::activation`](crate::Expand::activation) can then request a
/// placement for the name. Several activations can share a name, for example one per layer, and then have the same
/// placement. A name only has an effect in a step that is compiled with placements.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{LayerNorm, Linear};
/// use burn::tensor::{Tensor, activation::relu};
/// use burn_fsdp_mesh::Placement::Shard;
/// use burn_fsdp_spmd::{Expand, named_activation};
///
/// #[derive(Module, Debug)]
/// struct FeedForward {
///     norm: LayerNorm,
///     fc: Linear,
///     out: Linear,
/// }
///
/// impl FeedForward {
///     fn forward(&self, x: Tensor<3>) -> Tensor<3> {
///         let x = named_activation("residual", x);
///         let inner = relu(self.fc.forward(self.norm.forward(x.clone())));
///         named_activation("residual", x + self.out.forward(inner))
///     }
/// }
///
/// // Tensor parallelism between the products, sequence parallelism between two blocks.
/// let expand = Expand::new()
///     .parameter("**.fc.weight", "model", Shard(1))
///     .parameter("**.fc.bias", "model", Shard(0))
///     .parameter("**.out.weight", "model", Shard(0))
///     .activation("residual", "model", Shard(1));
/// ```
pub fn named_activation<const D: usize>(name: &str, activation: Tensor<D>) -> Tensor<D> {
    NAMED.with_borrow_mut(|named| {
        if let Some(named) = named {
            named.push((name.into(), float_id(&activation)));
        }
    });
    activation
}

/// Collects the activations named in one trace. Dropping it restores the activations of the enclosing trace, if there
/// is one.
pub(super) struct Naming(Option<Activations>);

impl Naming {
    pub(super) fn begin() -> Self {
        Self(NAMED.replace(Some(Vec::new())))
    }

    fn named() -> Activations {
        NAMED.with_borrow(|named| named.clone().unwrap_or_default())
    }

    /// Returns the activations named so far that match one of these patterns.
    pub(super) fn asked(&self, patterns: &[Pattern]) -> Activations {
        let asked = |name: &str| patterns.iter().any(|pattern| pattern.matches(name));
        let named = Self::named().into_iter();
        named.filter(|(name, _)| asked(name)).collect()
    }

    /// Rejects patterns that match no named activation.
    pub(super) fn check(&self, patterns: &[Pattern]) -> Result<(), Error> {
        let named = Self::named();
        let is_unknown = |pattern: &&Pattern| !named.iter().any(|(name, _)| pattern.matches(name));
        let Some(pattern) = patterns.iter().find(is_unknown) else {
            return Ok(());
        };
        let mut known: Vec<_> = named.iter().map(|(name, _)| name.as_ref()).collect();
        known.sort_unstable();
        known.dedup();
        Err(Error::UnknownName {
            what: "activation",
            name: pattern.to_string(),
            known: known.join(", "),
        })
    }
}

impl Drop for Naming {
    fn drop(&mut self) {
        NAMED.set(self.0.take());
    }
}
