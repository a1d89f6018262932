//! Mixed precision: in which types parameters compute and gradients travel.

use crate::pattern::Pattern;

/// Element types of a sharded module, as `T` names them. Shards, and with them the optimizer, keep the type in which
/// the module was built: the master copy.
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

/// Everything stays in the type in which the module was built.
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
    /// Returns the precision with full parameters, and so activations and gradients, of type
    /// `compute`. Shards are cast before they are gathered, which for 16 bits halves the traffic.
    pub fn new(compute: T) -> Self {
        Self {
            compute: Some(compute),
            ..Self::default()
        }
    }

    /// Casts gradients to `dtype` before they are reduced. Default: they travel in the type in
    /// which they were computed. Sums are made in 32 bits at least in any case, and arrive at the
    /// shards in the shards' type without having been rounded.
    pub fn reduce(mut self, dtype: T) -> Self {
        self.reduce = Some(dtype);
        self
    }

    /// Makes parameters in modules that match one of `patterns` compute in the shards' type: those
    /// of normalization layers, say. Each pattern must match a module.
    ///
    /// Burn has no hooks before a module's forward, so the model itself casts what goes in and comes
    /// out. Written so, it computes the same in any type, also without sharding:
    ///
    /// ```text
    /// let dtype = x.dtype();
    /// let x = self.norm.forward(x.cast(DType::F32)).cast(dtype);
    /// ```
    ///
    /// A model that does not cast may do the following:
    ///
    /// - Norms without states: be left out of `patterns`. `RmsNorm` takes its statistics in 32 bits by itself, `LayerNorm` and
    ///   `GroupNorm` in `F16`, and `LayerNorm` may stay in full beside `F16`.
    /// - `BatchNorm` and Burn's recurrent layers, whose states have the device's type: in compiled steps, be left out. The eager
    ///   engine refuses them in 16 bits, so that they need to be in `patterns`, and the model to cast.
    pub fn full_in<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Self {
        self.full_in = patterns.into_iter().map(Pattern::new).collect();
        self
    }

    /// Returns the type in which parameters compute that are in no pattern of [`full_in`](Self::full_in), if it is another than
    /// that in which they are stored.
    pub fn compute(&self) -> Option<T> {
        self.compute
    }

    /// Returns the first pattern of [`full_in`](Self::full_in) that matches no module around `paths`.
    pub fn unmatched(&self, paths: &[&str]) -> Option<&str> {
        let mut patterns = self.full_in.iter();
        let unmatched = patterns.find(|pattern| {
            let mut paths = paths.iter();
            !paths.any(|path| pattern.is_around(path))
        });
        unmatched.map(Pattern::as_str)
    }

    /// Returns the type in which the parameter at `path`, stored as `stored`, computes.
    pub fn compute_of<D: From<T>>(&self, path: &str, stored: D) -> D {
        let mut patterns = self.full_in.iter();
        match self.compute {
            Some(compute) if !patterns.any(|pattern| pattern.is_around(path)) => compute.into(),
            _ => stored,
        }
    }

    /// Returns the type in which gradients computed in `compute` are reduced.
    pub fn reduce_of<D: From<T>>(&self, compute: D) -> D {
        self.reduce.map_or(compute, Into::into)
    }
}
