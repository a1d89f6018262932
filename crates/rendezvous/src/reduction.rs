//! The reduction of addends to one result.

use std::fmt;

use burn_fsdp_mesh::ReduceOp;

use super::element::ElementType;

/// How the tensors of all ranks are combined into one.
///
/// Each rank's element is widened (see below) and multiplied by `pre_scale`. The products are combined in rank order.
/// The result is multiplied by `post_scale` (for [`ReduceOp::Mean`] divided by the size of the group) and rounded once.
/// The bits of the result therefore depend only on the reduction, the values and the size of the group.
///
/// `f32`, `f16` and `bf16` are widened to `f32`; `f64` stays `f64`. Integers wrap and cannot be scaled. A NaN of any
/// rank makes the result NaN, even for `Max` and `Min`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reduction {
    /// The operation that combines the addends.
    pub op: ReduceOp,
    /// The factor that multiplies every addend.
    pub pre_scale: f64,
    /// The factor that multiplies the result before it is rounded.
    pub post_scale: f64,
    /// Element type of the result; `None` for the type of the addends. `f32`, `f16` and `bf16` can be converted into
    /// each other; every other type keeps its type.
    pub output: Option<ElementType>,
}

impl Reduction {
    /// Returns a reduction that sums over the ranks.
    pub const fn sum() -> Self {
        Self::new(ReduceOp::Sum)
    }

    /// Returns a reduction that sums over the ranks of the group and divides by `world`. `world` may be larger than the
    /// group, for example in the sum over the shards of a replicated model, which precedes the sum over the replicas.
    ///
    /// A `world` of 0 counts as 1.
    pub fn mean(world: usize) -> Self {
        Self {
            post_scale: 1.0 / world.max(1) as f64,
            ..Self::sum()
        }
    }

    /// Returns a reduction that selects the largest addend.
    pub const fn max() -> Self {
        Self::new(ReduceOp::Max)
    }

    /// Returns a reduction that selects the smallest addend.
    pub const fn min() -> Self {
        Self::new(ReduceOp::Min)
    }

    const fn new(op: ReduceOp) -> Self {
        Self {
            op,
            pre_scale: 1.0,
            post_scale: 1.0,
            output: None,
        }
    }

    /// Multiplies every addend by `factor`, in addition to the factor set before.
    pub const fn pre_scaled(mut self, factor: f64) -> Self {
        self.pre_scale *= factor;
        self
    }

    /// Multiplies the result by `factor`, in addition to the factor set before.
    pub const fn post_scaled(mut self, factor: f64) -> Self {
        self.post_scale *= factor;
        self
    }

    /// Sets the element type of the result.
    pub const fn output(mut self, element: ElementType) -> Self {
        self.output = Some(element);
        self
    }

    /// Returns the element type of the result for addends of this type.
    #[inline]
    pub fn output_of(&self, input: ElementType) -> ElementType {
        self.output.unwrap_or(input)
    }

    /// Returns true if a factor may differ from 1.
    pub fn scales(&self) -> bool {
        self.op == ReduceOp::Mean || self.pre_scale != 1.0 || self.post_scale != 1.0
    }

    /// Returns the reason why addends of this type cannot be combined this way, or `None` if they can.
    #[inline]
    pub fn objection(&self, input: ElementType) -> Option<String> {
        let output = self.output_of(input);
        let narrow = |element| element != ElementType::F64 && ElementType::is_float(element);
        if output != input && !(narrow(input) && narrow(output)) {
            return Some(format!("{input} converted to {output}"));
        }
        if !input.is_float() && self.scales() {
            return Some(format!("{input} with a scale"));
        }
        if !(self.pre_scale.is_finite() && self.post_scale.is_finite()) {
            return Some(format!(
                "an addend scaled by {} and {}",
                self.pre_scale, self.post_scale
            ));
        }
        None
    }
}

/// Prints as `sum`, followed by scaling and conversion: `sum of x 0.5 then x 0.25 as f32`.
impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.op)?;
        if self.pre_scale != 1.0 {
            write!(f, " of x {}", self.pre_scale)?;
        }
        if self.post_scale != 1.0 {
            write!(f, " then x {}", self.post_scale)?;
        }
        match self.output {
            Some(output) => write!(f, " as {output}"),
            None => Ok(()),
        }
    }
}
