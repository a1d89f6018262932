//! The composed forms of attention kernels, generic over the number type.

use burn_ir::ScalarIr;

use crate::form::{Array, FormCall, FormScalar, Number, each_row, map, softmax, softmax_gradient};

/// A call of attention, with operands `[batch, time, heads, width]`.
pub(super) struct Attention<'a, N> {
    /// Queries, keys, values.
    operands: [&'a Array<N>; 3],
    /// The factor that scales the scores.
    scale: N,
    /// Masks, each with the score that it sets.
    fills: Vec<(&'a Array<N>, N)>,
    /// One factor for each probability, and a common factor.
    factors: Option<(&'a Array<N>, N)>,
    /// `[batch, heads, queries, keys]`.
    probabilities: Array<N>,
}

impl<'a, N: Number> Attention<'a, N> {
    /// `behind` are the inputs that follow the operands: masks, and perhaps factors.
    pub(super) fn of(
        call: &FormCall<'_, N>,
        operands: [&'a Array<N>; 3],
        behind: &'a [Array<N>],
    ) -> Result<Self, String> {
        let inputs = &call.call.inputs[call.inputs.len() - behind.len()..];
        let num_masks = inputs.iter().take_while(|input| input.dtype.is_bool());
        let (masks, factors) = behind.split_at(num_masks.count());
        let factors = match factors {
            [] => None,
            [factors] => Some((factors, call.scalar(masks.len() + 1)?)),
            _ => return Err("it has more operands than an attention".to_owned()),
        };
        let fills = masks.iter().zip(1..);
        let fills = fills.map(|(mask, number)| Ok((mask, call.scalar(number)?)));
        let fills = fills.collect::<Result<Vec<_>, String>>()?;
        let scale = call.scalar(0)?;
        let [queries, keys, _] = operands;
        let scores = product(&by_head(queries), &transposed(&by_head(keys)))?;
        let shape = scores.shape.clone();
        let mut scores = map(&shape, &[&scores], |a| a[0].mul(scale))?;
        for &(mask, fill) in &fills {
            let choose = |a: &[N]| if is_set(a[1]) { fill } else { a[0] };
            scores = map(&shape, &[&scores, mask], choose)?;
        }
        Ok(Self {
            operands,
            scale,
            fills,
            factors,
            probabilities: each_row(&scores, |row| softmax(row).probabilities),
        })
    }

    pub(super) fn result(&self) -> Result<Array<N>, String> {
        let weights = self.multiplied(self.probabilities.clone())?;
        Ok(by_time(&product(&weights, &by_head(self.operands[2]))?))
    }

    /// Multiplies probabilities, or their gradient, by the factors.
    fn multiplied(&self, of: Array<N>) -> Result<Array<N>, String> {
        match self.factors {
            None => Ok(of),
            Some((factors, number)) => {
                map(&of.shape, &[&of, factors], |a| a[0].mul(a[1]).mul(number))
            }
        }
    }

    /// Returns the gradients of queries, keys and values.
    pub(super) fn gradients(&self, grad: &Array<N>) -> Result<[Array<N>; 3], String> {
        let multiplied = |of| self.multiplied(of);
        let through = |mut of_scores: Array<N>| {
            let shape = of_scores.shape.clone();
            for (mask, _) in &self.fills {
                let keep = |a: &[N]| if is_set(a[1]) { N::default() } else { a[0] };
                of_scores = map(&shape, &[&of_scores, mask], keep)?;
            }
            map(&shape, &[&of_scores], |a| a[0].mul(self.scale))
        };
        let [queries, keys, values] = self.operands;
        let operands = [queries, keys, values, grad];
        gradients(&self.probabilities, operands, multiplied, through)
    }
}

/// A call of causal self-attention, with queries, keys and values in one tensor.
pub(super) struct Causal<N> {
    /// Queries, keys, values: `[batch, time, heads, width]`.
    parts: [Array<N>; 3],
    factor: N,
    /// `[batch, heads, queries, keys]`.
    probabilities: Array<N>,
}

impl<N: Number> Causal<N> {
    /// `positions` are those of the tokens in their documents, if the sequences have several.
    pub(super) fn of(
        call: &FormCall<'_, N>,
        qkv: &Array<N>,
        positions: &[Array<N>],
    ) -> Result<Self, String> {
        let size = |index: usize| match call.scalars.get(index) {
            Some(FormScalar::Number(number)) => Some(number.elem::<f64>() as usize),
            _ => None,
        };
        let size = |index: usize| size(index).filter(|size| *size > 0);
        let sizes = size(0)
            .zip(size(1))
            .ok_or("it does not specify its number of heads")?;
        let [positions] = positions else {
            return Self::within(qkv, sizes, None);
        };
        let &[_, time] = positions.shape.as_slice() else {
            return Err(format!("{:?} are not positions", positions.shape));
        };
        let most = size(2).map_or(usize::MAX, |reach| reach - 1);
        let positions = positions.elements.iter().enumerate();
        let firsts = positions.map(|(index, position)| {
            let before = position.index().min(most);
            (index % time).saturating_sub(before)
        });
        Self::within(qkv, sizes, Some(&firsts.collect::<Vec<_>>()))
    }

    /// `firsts` are the first keys that the queries attend to, sequence after sequence, unless they attend to all before
    /// them.
    fn within(
        qkv: &Array<N>,
        (batch, heads): (usize, usize),
        firsts: Option<&[usize]>,
    ) -> Result<Self, String> {
        let &[rows, columns] = qkv.shape.as_slice() else {
            return Err(format!("{:?} is not a matrix", qkv.shape));
        };
        let (time, dim) = (rows / batch, columns / 3);
        let part = |index: usize| {
            let own = qkv.rows().map(|row| &row[index * dim..][..dim]);
            let own = Array::new([rows, dim], own.flatten().copied().collect());
            own.reshaped(&[batch, time, heads, dim / heads])
        };
        let parts = [part(0)?, part(1)?, part(2)?];
        let scale = ((dim / heads) as f64).sqrt().recip();
        let factor = N::of_scalar(FormScalar::Number(ScalarIr::Float(scale)));
        let scores = product(&by_head(&parts[0]), &transposed(&by_head(&parts[1])))?;
        let mut number = 0;
        let probabilities = each_row(&scores, |row| {
            let (sequence, query) = (number / (heads * time), number % time);
            number += 1;
            let first = firsts.map_or(0, |firsts| firsts[sequence * time + query]);
            let seen: Vec<N> = row[first..=query]
                .iter()
                .map(|score| score.mul(factor))
                .collect();
            let mut probabilities = vec![N::default(); first];
            probabilities.extend(softmax(&seen).probabilities);
            probabilities.resize(row.len(), N::default());
            probabilities
        });
        Ok(Self {
            parts,
            factor,
            probabilities,
        })
    }

    pub(super) fn result(&self, qkv: &Array<N>) -> Result<Array<N>, String> {
        let mixed = by_time(&product(&self.probabilities, &by_head(&self.parts[2]))?);
        mixed.reshaped(&[qkv.shape[0], qkv.shape[1] / 3])
    }

    /// Returns the gradients of queries, keys and values, concatenated like `qkv`.
    pub(super) fn gradient(&self, qkv: &Array<N>, grad: &Array<N>) -> Result<Array<N>, String> {
        let [queries, keys, values] = &self.parts;
        let grad = grad.clone().reshaped(&queries.shape)?;
        let scaled = |of_scores: Array<N>| {
            let shape = of_scores.shape.clone();
            map(&shape, &[&of_scores], |a| a[0].mul(self.factor))
        };
        let operands = [queries, keys, values, &grad];
        let all = gradients(&self.probabilities, operands, Ok, scaled)?;
        let dim = qkv.shape[1] / 3;
        let rows = (0..qkv.shape[0]).flat_map(|row| {
            let own = all
                .iter()
                .flat_map(move |of| &of.elements[row * dim..][..dim]);
            own.copied()
        });
        Ok(Array::new(qkv.shape.clone(), rows.collect()))
    }
}

/// Returns the gradients of queries, keys and values from the gradient of an attention's result. `multiplied` applies
/// the factors to the probabilities and their gradient. `through` computes the gradient of the scores from the gradient
/// of the scaled scores.
fn gradients<N: Number>(
    probabilities: &Array<N>,
    [queries, keys, values, grad]: [&Array<N>; 4],
    multiplied: impl Fn(Array<N>) -> Result<Array<N>, String>,
    through: impl FnOnce(Array<N>) -> Result<Array<N>, String>,
) -> Result<[Array<N>; 3], String> {
    let grad = by_head(grad);
    let weights = multiplied(probabilities.clone())?;
    let of_values = product(&transposed(&weights), &grad)?;
    let of_weights = product(&grad, &transposed(&by_head(values)))?;
    let of_probabilities = multiplied(of_weights)?;
    let of_scores = through(softmax_gradient(probabilities, &of_probabilities))?;
    let of_queries = product(&of_scores, &by_head(keys))?;
    let of_keys = product(&transposed(&of_scores), &by_head(queries))?;
    Ok([of_queries, of_keys, of_values].map(|of| by_time(&of)))
}

fn is_set<N: Number>(mask: N) -> bool {
    mask.index() == 1
}

/// Returns the batched matrix product.
fn product<N: Number>(a: &Array<N>, b: &Array<N>) -> Result<Array<N>, String> {
    let mut shape = a.shape.clone();
    if let (Some(last), Some(columns)) = (shape.last_mut(), b.shape.last()) {
        *last = *columns;
    }
    N::matmul(a, b, &shape)
}

/// Returns `[batch, time, heads, width]` as `[batch, heads, time, width]`.
fn by_head<N: Copy>(tensor: &Array<N>) -> Array<N> {
    tensor.swapped(1, 2)
}

/// Returns `[batch, heads, time, width]` as `[batch, time, heads, width]`.
fn by_time<N: Copy>(tensor: &Array<N>) -> Array<N> {
    by_head(tensor)
}

/// Returns the transposed matrices.
fn transposed<N: Copy>(matrices: &Array<N>) -> Array<N> {
    let last = matrices.shape.len() - 1;
    matrices.swapped(last - 1, last)
}
