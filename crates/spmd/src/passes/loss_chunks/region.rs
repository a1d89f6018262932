//! The nodes that compute the loss and its gradients row by row.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use burn_fsdp_kernels::FusedOperation;
use burn_fsdp_mesh::ReduceOp;
use burn_ir::{
    BaseOperationIr, CustomOpIr, FloatOperationIr, ModuleOperationIr, OperationIr, ShapeOpIr,
    TensorId,
};

use crate::graph::{Graph, Node, Phase, random_of};
use crate::place::{Letter, Operand, Signature, is_pointwise, may_wait, signature_of};

/// The nodes that run once for each part of the rows.
#[derive(Debug)]
pub(super) struct Region {
    /// The nodes by index, and how each divides the rows.
    pub(super) nodes: BTreeMap<usize, Cut>,
    /// The dims of the rows of every value that has some of them in a part.
    pub(super) rows: BTreeMap<TensorId, Rows>,
    /// The nodes that need no result of the last product: constants, views, and what is as large as the logits, such as
    /// targets in a row of zeros. Other nodes may read their results for all rows, too.
    pub(super) before: BTreeSet<usize>,
    /// The other nodes that need a result of the region, directly or not.
    pub(super) later: BTreeSet<usize>,
    /// The number of rows.
    pub(super) num_rows: usize,
}

/// The dims that together count the rows: one, or several, such as sequences and their tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) first: usize,
    pub(super) len: usize,
}

impl Rows {
    /// Returns the dims without those of one element at both ends, which count nothing.
    fn trimmed(mut self, shape: &[usize]) -> Self {
        while self.len > 1 && shape[self.first] == 1 {
            self.first += 1;
            self.len -= 1;
        }
        while self.len > 1 && shape[self.first + self.len - 1] == 1 {
            self.len -= 1;
        }
        self
    }

    pub(super) fn dims(self) -> Range<usize> {
        self.first..self.first + self.len
    }
}

/// How a node computes a part of the rows.
#[derive(Debug, Clone)]
pub(super) struct Cut {
    /// Each input, with its rows; `None` for an input that every part needs whole.
    pub(super) inputs: Vec<(TensorId, Option<Rows>)>,
    pub(super) outputs: Vec<(TensorId, Share)>,
}

/// The share of a part in a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Share {
    /// The part's rows.
    Rows(Rows),
    /// An addend.
    Addend,
    /// A mean over the part's rows.
    Mean,
}

/// A tensor of a node, and its rows.
#[derive(Debug, Clone, Copy)]
enum Known {
    Input(TensorId, Rows),
    Output(TensorId, Rows),
}

impl Region {
    /// Finds the region: the last product on the way to the results, everything that reads or writes a tensor of the
    /// size of its result and has the same rows, and what lies between.
    ///
    /// # Errors
    ///
    /// The reason why the rows cannot be divided into `parts`.
    pub(super) fn find(graph: &Graph, parts: usize) -> Result<Self, String> {
        let (head, logits) = head(graph).ok_or("it has no matrix product")?;
        let shape = graph.value(logits).map(|value| value.shape.clone());
        let shape = shape.unwrap_or_default();
        let of_all = shape.len().saturating_sub(1);
        // Rows are all dims but the last, or the first one if an operation treats the others differently.
        let found = Self::with_rows(graph, (head, logits), &shape[..of_all], parts);
        found.or_else(|reason| match of_all {
            0 | 1 => Err(reason),
            _ => Self::with_rows(graph, (head, logits), &shape[..1], parts).map_err(|_| reason),
        })
    }

    fn with_rows(
        graph: &Graph,
        (head, logits): (usize, TensorId),
        dims: &[usize],
        parts: usize,
    ) -> Result<Self, String> {
        let num_rows = dims.iter().product();
        if num_rows < parts || dims.is_empty() {
            return Err(format!("the last product has {num_rows} rows"));
        }
        let of_logits = Rows {
            first: 0,
            len: dims.len(),
        };
        let of_logits = of_logits.trimmed(dims);
        let (mut cuts, rows) = divided(graph, head, (logits, of_logits));
        let large = large(graph, (head, logits), &rows);
        let region = selected(graph, head, (&cuts, &rows), &large)?;
        cuts.retain(|index, _| region.contains(index));
        let own = cuts.values().flat_map(|cut| &cut.outputs);
        let own = own.filter_map(|(id, share)| match share {
            Share::Rows(rows) => Some((*id, *rows)),
            _ => None,
        });
        let mut region = Self {
            rows: own.collect(),
            later: later(graph, head, &region),
            nodes: cuts,
            before: BTreeSet::new(),
            num_rows,
        };
        let activations = activations(graph);
        region.take_inputs(graph, logits, &activations)?;
        region.check_rest(graph, logits, &activations)?;
        Ok(region)
    }

    /// Rejects a region outside of which a gradient of the logits remains, because it does not depend on them. It is made of
    /// the batch alone. Weights may have the shape of the logits by chance.
    fn check_rest(
        &self,
        graph: &Graph,
        logits: TensorId,
        activations: &BTreeSet<TensorId>,
    ) -> Result<(), String> {
        let shape = |id: TensorId| graph.value(id).map(|value| &value.shape);
        let nodes = graph.nodes().iter().enumerate();
        let mut rest = nodes.filter(|(index, node)| {
            let is_part = self.nodes.contains_key(index) || self.later.contains(index);
            let is_like_logits =
                |id: TensorId| shape(id) == shape(logits) && !activations.contains(&id);
            !is_part && node.phase != Phase::Optimizer && node.outputs().any(is_like_logits)
        });
        match rest.next() {
            Some((_, node)) => Err(format!(
                "{} has all rows and columns of the logits",
                node.name()
            )),
            None => Ok(()),
        }
    }

    /// Makes nodes before the region part of it, if they are free, or computed from the batch and as large as the logits.
    /// Checks its inputs.
    fn take_inputs(
        &mut self,
        graph: &Graph,
        logits: TensorId,
        activations: &BTreeSet<TensorId>,
    ) -> Result<(), String> {
        let writers = writers(graph);
        let is_large = |id: &TensorId| 2 * size(graph, *id) >= size(graph, logits);
        let mut whole = BTreeSet::new();
        let mut open: Vec<_> = self
            .nodes
            .values()
            .flat_map(|cut| cut.inputs.clone())
            .collect();
        while let Some((id, rows)) = open.pop() {
            let known = self.rows.get(&id).copied();
            if known.is_some() && known == rows {
                continue;
            }
            let writer = writers.get(&id).copied();
            let is_late = |writer| self.nodes.contains_key(&writer) || self.later.contains(&writer);
            if writer.is_some_and(is_late)
                && writer.is_some_and(|writer| !self.before.contains(&writer))
            {
                return Err("the gradient of a row depends on the loss of other rows".to_owned());
            }
            let Some(rows) = rows else {
                whole.insert(id);
                continue;
            };
            if known.is_some() {
                return Err("an operation reads rows and columns of one tensor".to_owned());
            }
            self.rows.insert(id, rows);
            let Some(writer) = writer else {
                continue;
            };
            let node = &graph.nodes()[writer];
            let Some(cut) = cut(node, Known::Output(id, rows)) else {
                continue;
            };
            let divided = cut.inputs.iter().filter(|(_, rows)| rows.is_some());
            // Sums over rows are not made twice.
            let has_sum = cut
                .outputs
                .iter()
                .any(|(_, share)| !matches!(share, Share::Rows(_)));
            let mut tensors = divided.map(|(id, _)| *id).chain(node.outputs());
            let is_of_batch = !activations.contains(&id) && tensors.any(|id| is_large(&id));
            if !has_sum && (is_free(&node.operation) || is_of_batch) {
                open.extend(cut.inputs.iter().copied());
                self.nodes.insert(writer, cut);
                self.before.insert(writer);
            }
        }
        if whole.iter().any(|id| self.rows.contains_key(id)) {
            return Err("an operation reads rows and all of one tensor".to_owned());
        }
        Ok(())
    }
}

/// Returns the last product of forward on the way to the results, with its result.
fn head(graph: &Graph) -> Option<(usize, TensorId)> {
    let mut wanted: BTreeSet<TensorId> = graph.results().collect();
    for (index, node) in graph.nodes().iter().enumerate().rev() {
        if node.phase != Phase::Forward || !node.outputs().any(|output| wanted.contains(&output)) {
            continue;
        }
        if is_product(node) {
            return Some((index, node.outputs().next()?));
        }
        wanted.extend(node.inputs());
    }
    None
}

fn is_product(node: &Node) -> bool {
    matches!(
        node.operation,
        OperationIr::Float(_, FloatOperationIr::Matmul(_))
            | OperationIr::Module(
                ModuleOperationIr::Linear(_)
                    | ModuleOperationIr::LinearXBackward(_)
                    | ModuleOperationIr::LinearWeightBackward(_)
            )
    )
}

/// Returns how the nodes from `head` on that have rows of its result divide them, and the rows of their results.
fn divided(
    graph: &Graph,
    head: usize,
    (logits, of_logits): (TensorId, Rows),
) -> (BTreeMap<usize, Cut>, BTreeMap<TensorId, Rows>) {
    let mut all = BTreeMap::new();
    let mut cuts = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate().skip(head) {
        let read = node.inputs().find_map(|id| Some((id, *all.get(&id)?)));
        let known = match read {
            Some((id, rows)) => Known::Input(id, rows),
            None if index == head => Known::Output(logits, of_logits),
            None => continue,
        };
        let Some(cut) = cut(node, known) else {
            continue;
        };
        let disagrees = |(id, rows): &(TensorId, Option<Rows>)| {
            all.get(id).is_some_and(|known| Some(*known) != *rows)
        };
        if cut.inputs.iter().any(disagrees) {
            continue;
        }
        for (id, share) in &cut.outputs {
            if let Share::Rows(rows) = share {
                all.insert(*id, *rows);
            }
        }
        cuts.insert(index, cut);
    }
    (cuts, all)
}

/// Returns the values with the rows of the logits, and at least half as many columns.
fn large(
    graph: &Graph,
    (head, logits): (usize, TensorId),
    rows: &BTreeMap<TensorId, Rows>,
) -> BTreeSet<TensorId> {
    let is_large =
        |id: &TensorId| rows.contains_key(id) && 2 * size(graph, *id) >= size(graph, logits);
    let mut found = BTreeSet::from([logits]);
    for node in graph.nodes().iter().skip(head + 1) {
        // A product has other columns than its operand, even if there are as many.
        if !is_product(node) && node.inputs().any(|id| found.contains(&id)) {
            found.extend(node.outputs().filter(is_large));
        }
    }
    found
}

/// Returns the number of elements by which passes judge a value.
fn size(graph: &Graph, id: TensorId) -> usize {
    let own = graph.value(id).map_or(0, |value| value.num_elements());
    graph.sizes().elements(id, own)
}

/// Returns the nodes from `head` on that must run part by part, so that no `large` value is whole.
fn selected(
    graph: &Graph,
    head: usize,
    (cuts, rows): (&BTreeMap<usize, Cut>, &BTreeMap<TensorId, Rows>),
    large: &BTreeSet<TensorId>,
) -> Result<BTreeSet<usize>, String> {
    let is_large = |id: TensorId| large.contains(&id);
    if graph.kept().iter().any(|id| is_large(*id)) {
        return Err("the result of its last product is also a result of the step".to_owned());
    }
    let mut region = BTreeSet::new();
    let mut needed = BTreeSet::new();
    for (index, node) in graph.nodes().iter().enumerate().skip(head).rev() {
        let has_large = node.inputs().any(is_large) || node.outputs().any(is_large);
        let is_needed = node.outputs().any(|output| needed.contains(&output));
        if index != head && !has_large && !is_needed {
            continue;
        }
        if cuts.contains_key(&index) {
            region.insert(index);
            needed.extend(node.inputs().filter(|id| rows.contains_key(id)));
        } else if has_large {
            return Err(format!("{} needs all rows at once", node.name()));
        }
    }
    Ok(region)
}

/// Returns the nodes outside of the region that need one of its results.
fn later(graph: &Graph, head: usize, region: &BTreeSet<usize>) -> BTreeSet<usize> {
    let mut later = BTreeSet::new();
    let mut results = BTreeSet::new();
    for (index, node) in graph.nodes().iter().enumerate().skip(head) {
        if region.contains(&index) {
            results.extend(node.outputs());
        } else if node.inputs().any(|id| results.contains(&id)) {
            results.extend(node.outputs());
            later.insert(index);
        }
    }
    later
}

fn writers(graph: &Graph) -> BTreeMap<TensorId, usize> {
    let nodes = graph.nodes().iter().enumerate();
    let outputs = nodes.flat_map(|(index, node)| node.outputs().map(move |id| (id, index)));
    outputs.collect()
}

/// Returns the values that are computed from parameters or buffers.
fn activations(graph: &Graph) -> BTreeSet<TensorId> {
    let tensors = graph.parameters().iter().map(|parameter| parameter.value);
    let mut found: BTreeSet<TensorId> = tensors.collect();
    for node in graph.nodes() {
        if node.inputs().any(|id| found.contains(&id)) {
            found.extend(node.outputs());
        }
    }
    found
}

/// Returns true for constants and views.
fn is_free(operation: &OperationIr) -> bool {
    may_wait(operation) && !is_pointwise(operation) && random_of(operation).is_none()
}

/// Returns how a node divides the rows of one of its tensors; `None` if it needs all of them.
fn cut(node: &Node, known: Known) -> Option<Cut> {
    if node.draw.is_some() || node.is_opaque() || random_of(&node.operation).is_some() {
        return None;
    }
    match &node.operation {
        OperationIr::Custom(call) => of_cross_entropy(call).or_else(|| by_letters(node, known)),
        OperationIr::BaseFloat(BaseOperationIr::Reshape(op))
        | OperationIr::BaseInt(BaseOperationIr::Reshape(op))
        | OperationIr::BaseBool(BaseOperationIr::Reshape(op)) => reshaped(op, known),
        _ => by_letters(node, known),
    }
}

/// The kernels of the cross entropy have no signature: their gradient has the number of rows in it.
fn of_cross_entropy(call: &CustomOpIr) -> Option<Cut> {
    let rows = Rows { first: 0, len: 1 };
    let inputs = call.inputs.iter().map(|input| input.id);
    let outputs = call.outputs.iter().map(|output| output.id);
    match FusedOperation::named(&call.id)? {
        FusedOperation::CrossEntropy => Some(Cut {
            inputs: inputs.map(|id| (id, Some(rows))).collect(),
            outputs: outputs.zip([Share::Rows(rows), Share::Mean]).collect(),
        }),
        FusedOperation::CrossEntropyBackward => Some(Cut {
            inputs: inputs.zip([Some(rows), None]).collect(),
            outputs: outputs.zip([Share::Rows(rows)]).collect(),
        }),
        _ => None,
    }
}

/// A reshape may merge the dims of the rows, or split them.
fn reshaped(op: &ShapeOpIr, known: Known) -> Option<Cut> {
    let (input, output) = (op.input.shape.to_vec(), op.out.shape.to_vec());
    let (of_input, of_output) = match known {
        Known::Input(_, rows) => (rows, counterpart(&input, rows, &output)?),
        Known::Output(_, rows) => (counterpart(&output, rows, &input)?, rows),
    };
    Some(Cut {
        inputs: vec![(op.input.id, Some(of_input))],
        outputs: vec![(op.out.id, Share::Rows(of_output))],
    })
}

/// Returns the dims of `to` that have the same elements as the rows in `from`.
fn counterpart(from: &[usize], rows: Rows, to: &[usize]) -> Option<Rows> {
    let outer: usize = from[..rows.first].iter().product();
    let size: usize = from[rows.dims()].iter().product();
    let product = |dims: Range<usize>| to[dims].iter().product::<usize>();
    let first = (0..to.len()).find(|first| product(0..*first) == outer)?;
    let len = (1..=to.len() - first).find(|len| product(first..first + len) == size)?;
    Some(Rows { first, len }.trimmed(to))
}

/// Divides the rows of a node by the letters of its dims.
fn by_letters(node: &Node, known: Known) -> Option<Cut> {
    let signature = signature_of(&node.operation)?;
    let letters = letters_of(&signature, known)?;
    let inputs = signature.inputs.iter();
    let inputs = inputs.map(|input| Some((input.id, place_of(&letters, input)?)));
    let outputs = signature.outputs.iter().map(|output| {
        let of_sum = |letter: &Letter| signature.contracted.get(letter).copied();
        let share = match place_of(&letters, output)? {
            Some(rows) => Share::Rows(rows),
            None if letters
                .iter()
                .all(|letter| of_sum(letter) == Some(ReduceOp::Sum)) =>
            {
                Share::Addend
            }
            None if letters
                .iter()
                .all(|letter| of_sum(letter) == Some(ReduceOp::Mean)) =>
            {
                Share::Mean
            }
            None => return None,
        };
        Some((output.id, share))
    });
    Some(Cut {
        inputs: inputs.collect::<Option<_>>()?,
        outputs: outputs.collect::<Option<_>>()?,
    })
}

/// Returns the letters of the rows of a tensor. Dims of one element count nothing.
fn letters_of(signature: &Signature, known: Known) -> Option<Vec<Letter>> {
    let (operands, id, rows) = match known {
        Known::Input(id, rows) => (&signature.inputs, id, rows),
        Known::Output(id, rows) => (&signature.outputs, id, rows),
    };
    let operand = operands.iter().find(|operand| operand.id == id)?;
    let dims = rows.dims().filter(|dim| operand.shape[*dim] != 1);
    let letters: Option<Vec<Letter>> = dims.map(|dim| operand.letters[dim]).collect();
    letters.filter(|letters| !letters.is_empty())
}

/// Returns the rows of an operand whose dims have these letters, `Some(None)` if it has none of them, and `None` if it has
/// only some, or has them in another order or apart.
fn place_of(letters: &[Letter], operand: &Operand) -> Option<Option<Rows>> {
    let found: Vec<Option<usize>> = letters.iter().map(|of| operand.dim_of(*of)).collect();
    if found.iter().all(Option::is_none) {
        return Some(None);
    }
    let dims: Vec<usize> = found.into_iter().collect::<Option<_>>()?;
    let (first, last) = (*dims.first()?, *dims.last()?);
    let is_apart = |dim: &usize| !dims.contains(dim) && operand.shape[*dim] != 1;
    if !dims.is_sorted() || (first..=last).any(|dim| is_apart(&dim)) {
        return None;
    }
    let len = last + 1 - first;
    Some(Some(Rows { first, len }))
}
