//! What is known of tensors that the units of a sharded module do not manage.

use burn::module::ParamId;
use burn::tensor::{DType, Tensor};

use crate::convert::cast;

/// Tensors that the units do not manage, in which wrapping found or changed something.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    ignored: Vec<Named>,
    /// Running states that the policy cast, with their original types.
    cast: Vec<(Named, DType)>,
}

/// A tensor's path in the wrapped module, and its id.
#[derive(Debug, Clone)]
pub(crate) struct Named {
    pub(crate) path: String,
    pub(crate) id: ParamId,
}

impl Named {
    /// Returns true if this is the tensor with `id`. After a record has replaced the id, `path` identifies it: a path in
    /// the wrapped module or in one that contains it.
    fn is(&self, path: &str, id: ParamId) -> bool {
        let prefix = path.strip_suffix(self.path.as_str());
        // A single name may also occur in other modules.
        let is_below = |prefix: &str| self.path.contains('.') && prefix.ends_with('.');
        self.id == id || prefix.is_some_and(|prefix| prefix.is_empty() || is_below(prefix))
    }
}

impl Known {
    /// Notes the parameters that the policy ignored, and the running states that it cast, with their original types.
    pub(crate) fn new(ignored: Vec<Named>, cast: Vec<(Named, DType)>) -> Self {
        Self { ignored, cast }
    }

    /// Adds the running states that the policy of the submodule at `prefix` cast.
    pub(crate) fn adopt(&mut self, child: &Self, prefix: &str) {
        let states = child.cast.iter().map(|(state, dtype)| {
            let path = match prefix {
                "" => state.path.clone(),
                _ => format!("{prefix}.{}", state.path),
            };
            (Named { path, id: state.id }, *dtype)
        });
        for (state, dtype) in states {
            // All units of the submodule have the same root.
            if !self.cast.iter().any(|(known, _)| known.path == state.path) {
                self.cast.push((state, dtype));
            }
        }
    }

    /// Returns true if the policy ignored the parameter at `path` with `id`.
    pub(crate) fn leaves_alone(&self, path: &str, id: ParamId) -> bool {
        self.ignored.iter().any(|ignored| ignored.is(path, id))
    }

    /// Returns the original type of the running state at `path` with `id`, if a policy cast it.
    pub(crate) fn type_before_cast(&self, path: &str, id: ParamId) -> Option<DType> {
        let mut cast = self.cast.iter();
        let (_, dtype) = cast.find(|(state, _)| state.is(path, id))?;
        Some(*dtype)
    }

    /// Returns the tensor at `path` with `id` in its original type, if a policy cast it; otherwise unchanged.
    pub(crate) fn in_original_type<const D: usize>(
        &self,
        path: &str,
        id: ParamId,
        tensor: Tensor<D>,
    ) -> Tensor<D> {
        match self.type_before_cast(path, id) {
            Some(dtype) => cast(tensor, dtype),
            None => tensor,
        }
    }

    /// Returns true if no running state was cast.
    pub(crate) fn has_no_cast(&self) -> bool {
        self.cast.is_empty()
    }
}
