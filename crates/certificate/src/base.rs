//! Burn's operations on tensors of any type: views, indexing, masks.

use burn::tensor::IndexingUpdateOp;
use burn_ir::{
    BaseOperationIr, BinaryOpIr, GatherOpIr, ScatterOpIr, SelectAssignOpIr, SelectOpIr,
    SliceAssignOpIr, TensorIr,
};

use super::call::Call;
use super::field::Element;
use super::lanes::{along, places_along, reduced};
use super::pointwise::{Arithmetic, map};
use super::tensor::{Kind, Tensor, View};

impl Call<'_> {
    pub(super) fn base(&self, operation: &BaseOperationIr) -> Result<Vec<Tensor>, String> {
        use BaseOperationIr as Op;
        let view = |tensor: &TensorIr, change: &dyn Fn(View) -> View| {
            let tensor = self.get(tensor)?;
            Ok::<_, String>(tensor.taken(&change(tensor.view())))
        };
        let one = match operation {
            Op::Reshape(op) => self.get(&op.input)?.reshaped(op.out.shape.as_slice())?,
            Op::SwapDims(op) => view(&op.input, &|view| view.swapped(op.dim1, op.dim2))?,
            Op::Permute(op) => view(&op.input, &|view| view.permuted(&op.axes))?,
            Op::Flip(op) => view(&op.input, &|view| view.flipped(&op.axes))?,
            Op::Expand(op) => self.get(&op.input)?.expanded(op.out.shape.as_slice())?,
            Op::Unfold(op) => view(&op.input, &|view| view.unfolded(op.dim, op.size, op.step))?,
            Op::Slice(op) => {
                let tensor = self.get(&op.tensor)?;
                tensor.taken(&self.range_of(tensor, &op.ranges))
            }
            Op::SliceAssign(op) => self.slice_assign(op)?,
            Op::Select(op) => self.select(op)?,
            Op::SelectAssign(op) => self.select_assign(op)?,
            Op::Gather(op) => self.gather(op)?,
            Op::Scatter(op) => self.scatter(op)?,
            Op::MaskWhere(op) => {
                let operands = [&op.tensor, &op.mask, &op.value].map(|tensor| self.get(tensor));
                let [tensor, mask, value] = operands;
                let choose = |a: &[Element]| if a[1] == 1 { a[2] } else { a[0] };
                map(op.out.shape.as_slice(), &[tensor?, mask?, value?], choose)?
            }
            Op::MaskFill(op) => {
                let value = self.scalar(0)?.element(Kind::of(op.out.dtype));
                let operands = [self.get(&op.tensor)?, self.get(&op.mask)?];
                let choose = |a: &[Element]| if a[1] == 1 { value } else { a[0] };
                map(op.out.shape.as_slice(), &operands, choose)?
            }
            Op::Equal(op) => self.compared(op, |a, b| a == b)?,
            Op::NotEqual(op) => self.compared(op, |a, b| a != b)?,
            Op::EqualElem(op) | Op::NotEqualElem(op) => {
                let number = self.scalar(0)?.element(Kind::of(op.lhs.dtype));
                let wants = matches!(operation, Op::EqualElem(_));
                let shape = op.out.shape.as_slice();
                let is = |a: &[Element]| u64::from((a[0] == number) == wants);
                map(shape, &[self.get(&op.lhs)?], is)?
            }
            Op::RepeatDim(op) => {
                let tensor = self.get(&op.tensor)?;
                let shape = op.out.shape.as_slice();
                let repeat = |lane: &[Element]| lane.repeat(op.times);
                along(tensor, op.dim, shape, repeat)
            }
            Op::Cat(op) => self.cat(&op.tensors, op.dim, op.out.shape.as_slice())?,
            Op::Cast(op) => self.get(&op.input)?.clone(),
            Op::Ones(op) => Tensor::full(op.out.shape.as_slice(), 1),
            Op::Zeros(op) => Tensor::full(op.out.shape.as_slice(), 0),
            Op::All(op) | Op::Any(op) => {
                let input = self.get(&op.input)?;
                let axes: Vec<usize> = (0..input.shape.len()).collect();
                self.joined(input, &axes, &op.out, matches!(operation, Op::All(_)))
            }
            Op::AllDim(op) | Op::AnyDim(op) => {
                let input = self.get(&op.input)?;
                let is_all = matches!(operation, Op::AllDim(_));
                self.joined(input, &[op.axis], &op.out, is_all)
            }
            // No result may depend on uninitialized memory, so it is random.
            Op::Empty(_) => return self.drawn(),
            Op::ScatterNd(_) | Op::GatherNd(_) => return self.opaque(),
        };
        Ok(vec![one])
    }

    fn joined(&self, input: &Tensor, axes: &[usize], out: &TensorIr, is_all: bool) -> Tensor {
        let is_set = |element: &Element| *element != 0;
        reduced(input, axes, out.shape.as_slice(), |lane| {
            u64::from(if is_all {
                lane.iter().all(is_set)
            } else {
                lane.iter().any(is_set)
            })
        })
    }

    fn compared(
        &self,
        op: &BinaryOpIr,
        holds: impl Fn(Element, Element) -> bool,
    ) -> Result<Tensor, String> {
        let operands = [self.get(&op.lhs)?, self.get(&op.rhs)?];
        let is = |a: &[Element]| u64::from(holds(a[0], a[1]));
        map(op.out.shape.as_slice(), &operands, is)
    }

    fn range_of(&self, tensor: &Tensor, ranges: &[burn::tensor::Slice]) -> View {
        let mut view = tensor.view();
        for (dim, range) in ranges.iter().enumerate().take(tensor.shape.len()) {
            let indices = range.to_range(tensor.shape[dim]);
            view = view.sliced(dim, indices, range.step);
        }
        view
    }

    fn slice_assign(&self, op: &SliceAssignOpIr) -> Result<Tensor, String> {
        let (tensor, value) = (self.get(&op.tensor)?, self.get(&op.value)?);
        let view = self.range_of(tensor, &op.ranges);
        let value = value.expanded(&view.shape)?;
        let mut elements = tensor.elements.to_vec();
        for (place, element) in view.places().into_iter().zip(value.elements.iter()) {
            elements[place] = *element;
        }
        Ok(Tensor::new(tensor.shape.clone(), elements))
    }

    fn select(&self, op: &SelectOpIr) -> Result<Tensor, String> {
        let (tensor, indices) = (self.get(&op.tensor)?, self.get(&op.indices)?);
        let shape = op.out.shape.as_slice();
        let len = tensor.shape[op.dim];
        let chosen = |lane: &[Element]| {
            let chosen = indices.elements.iter();
            chosen.map(|index| lane[wrapped(*index, len)]).collect()
        };
        Ok(along(tensor, op.dim, shape, chosen))
    }

    fn select_assign(&self, op: &SelectAssignOpIr) -> Result<Tensor, String> {
        let (tensor, indices) = (self.get(&op.tensor)?, self.get(&op.indices)?);
        let value = self.get(&op.value)?;
        let places = chosen_along(tensor, &value.shape, op.dim, |at| {
            let stride: usize = value.shape[op.dim + 1..].iter().product();
            indices.elements[at / stride.max(1) % value.shape[op.dim]]
        });
        Ok(self.written(tensor, &places, value, &op.update, op.out.dtype))
    }

    fn gather(&self, op: &GatherOpIr) -> Result<Tensor, String> {
        let (tensor, indices) = (self.get(&op.tensor)?, self.get(&op.indices)?);
        let shape = &indices.shape;
        let places = chosen_along(tensor, shape, op.dim, |at| indices.elements[at]);
        let elements = places.into_iter().map(|place| tensor.elements[place]);
        Ok(Tensor::new(shape.clone(), elements.collect()))
    }

    fn scatter(&self, op: &ScatterOpIr) -> Result<Tensor, String> {
        let (tensor, indices) = (self.get(&op.tensor)?, self.get(&op.indices)?);
        let value = self.get(&op.value)?;
        let places = chosen_along(tensor, &indices.shape, op.dim, |at| indices.elements[at]);
        Ok(self.written(tensor, &places, value, &op.update, op.out.dtype))
    }

    /// Returns the tensor combined with values at these flat indices, one after the other.
    fn written(
        &self,
        tensor: &Tensor,
        places: &[usize],
        value: &Tensor,
        update: &IndexingUpdateOp,
        dtype: burn::tensor::DType,
    ) -> Tensor {
        let kind = Kind::of(dtype);
        let mut elements = tensor.elements.to_vec();
        for (place, new) in places.iter().zip(value.elements.iter()) {
            let old = elements[*place];
            elements[*place] = match (update, kind) {
                (IndexingUpdateOp::Assign, _) => *new,
                // Burn adds booleans by `or`.
                (IndexingUpdateOp::Add, Kind::Bool) => old | new,
                (IndexingUpdateOp::Add, kind) => Arithmetic::Add.of(kind, old, *new),
                (IndexingUpdateOp::Mul, kind) => Arithmetic::Mul.of(kind, old, *new),
                (IndexingUpdateOp::Min, kind) if kind.order(*new) >= kind.order(old) => old,
                (IndexingUpdateOp::Max, kind) if kind.order(*new) <= kind.order(old) => old,
                (IndexingUpdateOp::Min | IndexingUpdateOp::Max, _) => *new,
            };
        }
        Tensor::new(tensor.shape.clone(), elements)
    }

    fn cat(&self, tensors: &[TensorIr], dim: usize, shape: &[usize]) -> Result<Tensor, String> {
        let mut elements = vec![0; shape.iter().product()];
        let mut first = 0;
        for tensor in tensors {
            let tensor = self.get(tensor)?;
            let len = tensor.shape[dim];
            let whole = View {
                shape: shape.to_vec(),
                strides: super::tensor::strides(shape),
                start: 0,
            };
            let places = whole.sliced(dim, first..first + len, 1).places();
            for (place, element) in places.into_iter().zip(tensor.elements.iter()) {
                elements[place] = *element;
            }
            first += len;
        }
        Ok(Tensor::new(shape, elements))
    }
}

/// Returns, for each element of `shape`, the flat index in `tensor` of the element selected along a dim.
fn chosen_along(
    tensor: &Tensor,
    shape: &[usize],
    dim: usize,
    index: impl Fn(usize) -> Element,
) -> Vec<usize> {
    let len = tensor.shape[dim];
    places_along(shape, &tensor.view(), dim, |at| wrapped(index(at), len))
}

/// Wraps an out-of-bounds index into the range of a dim. All operations wrap in the same way.
pub(super) fn wrapped(index: Element, len: usize) -> usize {
    (index as i64).rem_euclid(len.max(1) as i64) as usize
}
