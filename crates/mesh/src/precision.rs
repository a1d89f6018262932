//! Mixed precision: the types of computation and of gradient reduction.

use crate::pattern::Pattern;

/// The element types of a sharded module, as values of `T`. Shards and optimizer state are the master copy and keep the
/// module's original type.
///
/// ```
/// use burn_fsdp_mesh::Precision;
///
/// let precision = Precision::new("bf16").reduce("f32").full_in(["**.norm"]);
/// assert_eq!(precision.compute_of("blocks.0.fc.weight", "f32"), "bf16");
/// assert_eq!(precision.compute_of("blocks.0.norm.gamma", "f32"), "f32");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Precision<T> {
    compute: Option<T>,
    reduce: Option<T>,
    full_in: Vec<Pattern>,
}

/// The default keeps everything in the module's original type.
impl<T> Default for Precision<T> {
    fn default() -> Self {
        Self {
            compute: None,
            reduce: None,
            full_in: Vec::new(),
        }
    }
}

impl<T: Copy> Precision<T> {
    /// Creates a precision in which full parameters, and therefore activations and gradients, have the type
    /// `compute`. Shards are cast before they are gathered, which halves the traffic for 16-bit types.
    pub fn new(compute: T) -> Self {
        Self {
            compute: Some(compute),
            ..Self::default()
        }
    }

    /// Casts gradients to `dtype` before they are reduced. By default they are sent in the type that they were computed
    /// in. Sums always use at least 32 bits and reach the shards in the shards' type without intermediate rounding.
    pub fn reduce(mut self, dtype: T) -> Self {
        self.reduce = Some(dtype);
        self
    }

    /// Makes parameters in modules that match one of `patterns` compute in the shards' type, for example those in
    /// normalization layers. Each pattern must match a module.
    ///
    /// Burn has no hooks before a module's forward, so the model itself casts inputs and outputs. The following code
    /// computes the same in any type, even without sharding:
    ///
    /// ```text
    /// let dtype = x.dtype();
    /// let x = self.norm.forward(x.cast(DType::F32)).cast(dtype);
    /// ```
    ///
    /// A model that does not cast has these choices:
    ///
    /// - Norms without states: leave them out of `patterns`. `RmsNorm` already computes its statistics in 32 bits.
    ///   `LayerNorm` and `GroupNorm` do so in `F16`. `LayerNorm` may stay in full precision in an `F16` model.
    /// - `BatchNorm` and Burn's recurrent layers, whose states have the device's type: leave them out in compiled
    ///   steps. The eager engine rejects them in 16 bits, so there they must be in `patterns`, and the model must cast.
    pub fn full_in<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.full_in = patterns.into_iter().map(Pattern::new).collect();
        self
    }

    /// Returns the compute type of parameters that match no pattern of [`full_in`](Self::full_in), or `None` if they
    /// compute in their stored type.
    pub fn compute(&self) -> Option<T> {
        self.compute
    }

    /// Returns the first pattern of [`full_in`](Self::full_in) that matches no module containing one of the `paths`.
    pub fn unmatched(&self, paths: &[&str]) -> Option<&str> {
        let mut patterns = self.full_in.iter();
        let unmatched = patterns.find(|pattern| {
            let mut paths = paths.iter();
            !paths.any(|path| pattern.is_around(path))
        });
        unmatched.map(Pattern::as_str)
    }

    /// Returns the compute type of the parameter at `path`, whose stored type is `stored`.
    pub fn compute_of<D: From<T>>(&self, path: &str, stored: D) -> D {
        let mut patterns = self.full_in.iter();
        match self.compute {
            Some(compute) if !patterns.any(|pattern| pattern.is_around(path)) => compute.into(),
            _ => stored,
        }
    }

    /// Returns the type in which gradients are reduced if they were computed in `compute`.
    pub fn reduce_of<D: From<T>>(&self, compute: D) -> D {
        self.reduce.map_or(compute, Into::into)
    }
}
