//! Running statistics that are stored in 32 bits and updated by operations in the layer's compute type.
//!
//! Burn's BatchNorm adds a batch's statistics to the stored ones, so both must have the same type. In 16 bits, updates
//! would be rounded away, because a hundredth of a change is less than the last bit. The layer therefore gets a copy of
//! its statistics in its compute type, and this module repeats the update in 32 bits.

use burn_ir::{
    BaseOperationIr, BinaryOpIr, CastOpIr, NumericOperationIr, OperationIr, ScalarOpIr, TensorId,
    TensorIr, TensorStatus,
};

use super::capture::Captured;
use super::module::Leaf;

/// Repeats the updates of running statistics in their stored types.
pub(super) fn widen(
    operations: &mut Vec<OperationIr>,
    leaves: &[Leaf],
    updates: &mut [Option<Captured>],
) {
    for (leaf, update) in leaves.iter().zip(updates) {
        let Some(update) = update.as_mut().filter(|update| update.dtype != leaf.dtype) else {
            continue;
        };
        let highest = operations.iter().flat_map(OperationIr::outputs);
        let highest = highest.map(|output| output.id.value()).max().unwrap_or(0);
        let mut again = Again {
            operations,
            kept: leaf,
            new: Vec::new(),
            highest,
        };
        let Some(id) = again.of(update.id) else {
            continue;
        };
        let (new, position) = (again.new, position(operations, update.id));
        let behind = position.map_or(operations.len(), |position| position + 1);
        operations.splice(behind..behind, new);
        *update = Captured {
            id,
            shape: leaf.shape.clone(),
            dtype: leaf.dtype,
        };
    }
}

fn position(operations: &[OperationIr], id: TensorId) -> Option<usize> {
    let makes = |operation: &OperationIr| operation.outputs().any(|output| output.id == id);
    operations.iter().position(makes)
}

/// Repeats the operations of one update in the type of the stored statistic.
struct Again<'a> {
    operations: &'a [OperationIr],
    /// The stored statistic.
    kept: &'a Leaf,
    new: Vec<OperationIr>,
    /// The highest id so far.
    highest: u64,
}

impl Again<'_> {
    /// Returns the tensor `id` in the stored statistic's type; `None` if no operation writes it.
    fn of(&mut self, id: TensorId) -> Option<TensorId> {
        let maker = &self.operations[position(self.operations, id)?];
        let made = maker.outputs().find(|output| output.id == id)?.clone();
        let maker = maker.clone();
        match maker {
            OperationIr::BaseFloat(BaseOperationIr::Cast(cast))
                if cast.input.dtype == self.kept.dtype =>
            {
                Some(cast.input.id)
            }
            OperationIr::NumericFloat(_, operation) => match self.numeric(operation)? {
                Some(id) => Some(id),
                None => Some(self.cast(made)),
            },
            _ => Some(self.cast(made)),
        }
    }

    /// Repeats a sum, difference, product or quotient in the stored statistic's type. Returns an inner `None` for other
    /// operations, and an outer `None` if no operation writes an operand.
    fn numeric(&mut self, operation: NumericOperationIr) -> Option<Option<TensorId>> {
        use NumericOperationIr as N;
        type Binary = fn(BinaryOpIr) -> N;
        type Scalar = fn(ScalarOpIr) -> N;
        let binary: (Binary, BinaryOpIr) = match operation {
            N::Add(op) => (N::Add, op),
            N::Sub(op) => (N::Sub, op),
            N::Mul(op) => (N::Mul, op),
            N::Div(op) => (N::Div, op),
            N::AddScalar(op) => return self.scalar(N::AddScalar, op).map(Some),
            N::SubScalar(op) => return self.scalar(N::SubScalar, op).map(Some),
            N::MulScalar(op) => return self.scalar(N::MulScalar, op).map(Some),
            N::DivScalar(op) => return self.scalar(N::DivScalar as Scalar, op).map(Some),
            _ => return Some(None),
        };
        let (make, op) = binary;
        let (lhs, rhs) = (self.of(op.lhs.id)?, self.of(op.rhs.id)?);
        let (lhs, rhs) = (self.wide(op.lhs, lhs), self.wide(op.rhs, rhs));
        let out = self.output(op.out);
        let id = out.id;
        self.push(make(BinaryOpIr { lhs, rhs, out }));
        Some(Some(id))
    }

    fn scalar(
        &mut self,
        make: fn(ScalarOpIr) -> NumericOperationIr,
        op: ScalarOpIr,
    ) -> Option<TensorId> {
        let lhs = self.of(op.lhs.id)?;
        let lhs = self.wide(op.lhs, lhs);
        let out = self.output(op.out);
        let id = out.id;
        self.push(make(ScalarOpIr { lhs, out, ..op }));
        Some(id)
    }

    fn push(&mut self, operation: NumericOperationIr) {
        let dtype = self.kept.dtype;
        self.new.push(OperationIr::NumericFloat(dtype, operation));
    }

    fn cast(&mut self, input: TensorIr) -> TensorId {
        let out = self.output(input.clone());
        let id = out.id;
        let status = TensorStatus::ReadOnly;
        let input = TensorIr { status, ..input };
        let cast = BaseOperationIr::Cast(CastOpIr { input, out });
        self.new.push(OperationIr::BaseFloat(cast));
        id
    }

    /// Returns an operand with id `id` in the stored statistic's type.
    fn wide(&self, of: TensorIr, id: TensorId) -> TensorIr {
        TensorIr {
            id,
            dtype: self.kept.dtype,
            status: TensorStatus::ReadOnly,
            ..of
        }
    }

    fn output(&mut self, of: TensorIr) -> TensorIr {
        self.highest += 1;
        TensorIr::uninit(TensorId::new(self.highest), of.shape, self.kept.dtype)
    }
}
