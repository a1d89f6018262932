//! Signatures: how an operation relates the dims of its operands and results, independent of ranks.

use std::collections::BTreeMap;

use burn_fsdp_mesh::ReduceOp;
use burn_ir::{TensorId, TensorIr};

/// The name of a dim in the operands and results of one operation. Dims with the same letter correspond.
pub(crate) type Letter = char;

/// The dims of an operation's operands, named as in an einsum: a matrix product is `mk, kn -> mn`.
///
/// An operation may run sharded along one letter. Every operand with the letter is sharded along its dim, and every
/// other operand is whole. Results with the letter are sharded. Results without it are addends if the letter is
/// [contracted](Self::contracted); otherwise the operation cannot be sharded along it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Signature {
    /// Inputs in the order of the operation.
    pub(crate) inputs: Vec<Operand>,
    /// Outputs in the order of the operation.
    pub(crate) outputs: Vec<Operand>,
    /// The letters over which results are reduced, and by which reduction.
    pub(crate) contracted: BTreeMap<Letter, ReduceOp>,
    /// Sets of inputs in which the results are jointly linear: if all inputs of a set are addends, so are the results.
    pub(crate) linear: Vec<Vec<TensorId>>,
    /// True if the operation may run on padding along a letter. Each element must only affect results at the same
    /// position along the letter, and may have any value, unlike an index.
    pub(crate) takes_padding: bool,
}

/// A tensor of an operation.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub(crate) id: TensorId,
    pub(crate) shape: Vec<usize>,
    /// The letter of each dim; `None` for dims that are always whole.
    pub(crate) letters: Vec<Option<Letter>>,
}

impl Operand {
    /// Returns the dim of a letter.
    pub(crate) fn dim_of(&self, letter: Letter) -> Option<usize> {
        self.letters.iter().position(|l| *l == Some(letter))
    }
}

impl Signature {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds an input with one letter per dim, or `.` for a dim that is always whole.
    pub(crate) fn input(self, tensor: &TensorIr, letters: &str) -> Self {
        self.input_of(tensor, spelled(letters))
    }

    /// Adds an output with one letter per dim, as for [`input`](Self::input).
    pub(crate) fn output(self, tensor: &TensorIr, letters: &str) -> Self {
        self.output_of(tensor, spelled(letters))
    }

    pub(crate) fn input_of(mut self, tensor: &TensorIr, letters: Vec<Option<Letter>>) -> Self {
        self.inputs.push(operand(tensor, letters));
        self
    }

    pub(crate) fn output_of(mut self, tensor: &TensorIr, letters: Vec<Option<Letter>>) -> Self {
        self.outputs.push(operand(tensor, letters));
        self
    }

    /// Declares that the results are sums over this letter.
    pub(crate) fn sums(self, letter: Letter) -> Self {
        self.contracts(letter, ReduceOp::Sum)
    }

    /// Declares that results are reduced over this letter.
    pub(crate) fn contracts(mut self, letter: Letter, op: ReduceOp) -> Self {
        self.contracted.insert(letter, op);
        self
    }

    /// Declares that the operation may run on padding.
    pub(crate) fn on_padding(mut self) -> Self {
        self.takes_padding = true;
        self
    }

    /// Returns true if the operation can be divided along a letter into this many equal parts, one per rank.
    pub(crate) fn divides(&self, letter: Letter, num_ranks: usize) -> bool {
        self.sizes(letter)
            .all(|size| size.is_multiple_of(num_ranks))
    }

    /// Returns true if the operation can be divided among this many ranks along a letter, with padding for unequal
    /// parts. A reduction over the letter must be a sum, because cleared padding adds nothing to it.
    pub(crate) fn divides_padded(&self, letter: Letter, num_ranks: usize) -> bool {
        let mut sizes = self.sizes(letter);
        let first = sizes.next();
        // If a dim is split or merged, rounded parts do not hold the same elements.
        let is_one = sizes.all(|size| Some(size) == first);
        let is_sum = self
            .contracted
            .get(&letter)
            .is_none_or(|op| *op == ReduceOp::Sum);
        self.takes_padding && is_one && is_sum && first.is_some_and(|size| size >= num_ranks)
    }

    /// Returns the size of a letter in each operand that has it.
    fn sizes(&self, letter: Letter) -> impl Iterator<Item = usize> {
        let operands = self.inputs.iter().chain(&self.outputs);
        operands.filter_map(move |operand| Some(operand.shape[operand.dim_of(letter)?]))
    }

    /// Declares that results are jointly linear in these inputs.
    pub(crate) fn linear_in<'a>(mut self, tensors: impl IntoIterator<Item = &'a TensorIr>) -> Self {
        self.linear
            .push(tensors.into_iter().map(|tensor| tensor.id).collect());
        self
    }

    /// Returns the signature of an operand's gradient, derived from this signature of the forward operation. The
    /// gradient has the operand's letters. It reads some of the operands and the gradient of the result, which has the
    /// result's letters. It is a sum over the letters that the operand lacks.
    ///
    /// One table of rules therefore covers an operation and its gradients.
    pub(crate) fn gradient(
        &self,
        operand: usize,
        read: &[usize],
        of_result: &TensorIr,
        out: &TensorIr,
    ) -> Self {
        let letters = |index: usize| self.inputs[index].letters.clone();
        let mut gradient = Self::new();
        for index in read {
            gradient.inputs.push(self.inputs[*index].clone());
        }
        gradient = gradient
            .input_of(of_result, self.outputs[0].letters.clone())
            .output_of(out, letters(operand));
        let kept: Vec<Letter> = letters(operand).into_iter().flatten().collect();
        let summed = gradient.letters();
        let summed = summed.into_iter().filter(|letter| !kept.contains(letter));
        summed.fold(gradient, Self::sums)
    }

    /// Returns why no operation can have this signature; `None` if it is valid.
    pub(crate) fn fault(&self) -> Option<String> {
        let operands = || self.inputs.iter().chain(&self.outputs);
        for letter in self.letters() {
            let mut sizes: Option<(usize, usize)> = None;
            for operand in operands() {
                let dims = operand.letters.iter();
                let own: Vec<usize> = dims
                    .enumerate()
                    .filter(|(_, own)| **own == Some(letter))
                    .map(|(dim, _)| dim)
                    .collect();
                let &[dim] = own.as_slice() else {
                    if own.is_empty() {
                        continue;
                    } else {
                        return Some(format!("{letter} names two dims of a tensor"));
                    }
                };
                // If a dim is split or merged, parts hold the same elements only if the dims before it have equally
                // many elements.
                let before: usize = operand.shape[..dim].iter().product();
                let size = operand.shape[dim];
                match sizes {
                    Some((of, outer)) if of != size && outer != before => {
                        return Some(format!("{letter} has sizes {of} and {size}"));
                    }
                    _ => sizes = Some((size, before)),
                }
            }
        }
        let is_in = |letter: &Letter, operand: &Operand| operand.dim_of(*letter).is_some();
        for letter in self.contracted.keys() {
            if !self.inputs.iter().any(|input| is_in(letter, input)) {
                return Some(format!("{letter} is combined, but no operand has it"));
            }
            if self.outputs.iter().all(|output| is_in(letter, output)) {
                return Some(format!("{letter} is combined, but all results have it"));
            }
        }
        let known = |id: &TensorId| self.inputs.iter().any(|input| input.id == *id);
        if self.linear.iter().flatten().all(known) {
            None
        } else {
            Some("it is linear in a tensor that it does not read".to_owned())
        }
    }

    /// Returns every letter, once, in alphabetical order.
    pub(crate) fn letters(&self) -> Vec<Letter> {
        let operands = self.inputs.iter().chain(&self.outputs);
        let mut letters: Vec<_> = operands
            .flat_map(|operand| operand.letters.iter().flatten().copied())
            .collect();
        letters.sort_unstable();
        letters.dedup();
        letters
    }
}

fn operand(tensor: &TensorIr, mut letters: Vec<Option<Letter>>) -> Operand {
    let shape = tensor.shape.to_vec();
    letters.resize(shape.len(), None);
    Operand {
        id: tensor.id,
        shape,
        letters,
    }
}

/// Returns one letter per dim, or `None` for `.`.
pub(crate) fn spelled(letters: &str) -> Vec<Option<Letter>> {
    letters
        .chars()
        .map(|letter| (letter != '.').then_some(letter))
        .collect()
}

/// Returns a letter for each dim, starting with `A`.
pub(crate) fn alphabet(num_dims: usize) -> Vec<Option<Letter>> {
    (b'A'..)
        .take(num_dims)
        .map(|byte| Some(char::from(byte)))
        .collect()
}

/// Returns the letters of a tensor that is broadcast to `shape`. The dims of `shape` have the letters of [`alphabet`].
/// Dims are aligned at the end, and dims with a different size are whole.
pub(crate) fn aligned(tensor: &TensorIr, shape: &[usize]) -> Vec<Option<Letter>> {
    let own = tensor.shape.to_vec();
    let missing = shape.len().saturating_sub(own.len());
    let letters = alphabet(shape.len());
    own.iter()
        .enumerate()
        .map(|(dim, size)| {
            let target = dim + missing;
            letters
                .get(target)
                .copied()
                .flatten()
                .filter(|_| shape.get(target) == Some(size))
        })
        .collect()
}
