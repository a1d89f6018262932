//! A compiled graph that computes the next logits with weights that are divided among ranks and do not move.
//!
//! Each rank holds some rows or some columns of each matrix, and multiplies with them. The ranks exchange the products
//! of the new tokens, which are much smaller than weights. If the number of key heads allows it, each rank also holds
//! only the keys and values of its heads.

use burn::backend::{DispatchKindConversion, DispatchTensor};
use burn::optim::SgdConfig;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_fsdp::compile::{CompiledStep, Evaluation, Expand, Mode};
use burn_fsdp::internals::compile::{BackendIr, ShardSpec, compile_on};
use burn_fsdp::{Mesh, Placement, ProcessGroup, ProcessMesh};
use burn_fsdp_models::{
    Architecture, DecodeInputs, DecodeRows, Decoded, LanguageModel, ModelConfig, ParameterSpec,
    RowsForm, decode,
};

use super::decoder::{Decoder, Sequence, known, seen_tokens};
use super::sample::Sample;
use crate::error::RankError;

/// The axis of the ranks.
const AXIS: &str = "ranks";

/// The most graphs that are kept. The number of columns only grows, so a graph that goes is not needed again.
const NUM_GRAPHS: usize = 64;

/// The tensors of [`DecodeInputs`]. Keys and values are in the last part.
type Inputs = (
    (Tensor<2, Int>, Tensor<2, Int>, Tensor<1, Int>),
    (Tensor<4, Bool>, Option<Tensor<4, Bool>>),
    Vec<[Tensor<4>; 2]>,
);

/// The tensors of [`Decoded`].
type Outputs = (Tensor<2>, Vec<[Tensor<4>; 2]>);

/// The weights of a rank, and the sequences that all ranks continue together.
pub(crate) struct PlacedDecoder<'a, Be: BackendIr> {
    /// It never trains: it holds the weights.
    step: CompiledStep<(), Be>,
    forward: Evaluation<Inputs, Outputs>,
    rows: DecodeRows,
    /// The prompt in each row.
    prompts: Vec<Option<usize>>,
    sample: &'a Sample<'a>,
}

/// Returns the placement of a parameter of this path and shape on ranks that divide products. Vectors are small, so
/// every rank has them whole.
fn placement<A: Architecture>(sizes: &A, path: &str, shape: &[usize], ranks: usize) -> Placement {
    let by_columns = || {
        let mut names = path.rsplit('.').skip(1);
        names
            .next()
            .is_some_and(|name| sizes.cut_by_columns().contains(&name))
    };
    let has_enough = shape.iter().all(|size| *size >= ranks);
    match shape.len() {
        2 if has_enough && by_columns() => Placement::Shard(1),
        2 if has_enough => Placement::Shard(0),
        _ => Placement::Replicate,
    }
}

/// Returns the bytes that a rank exchanges in the step of one token of each of `batch` sequences: columns of products and
/// of rows of the embedding, or sums of products, which cost twice as much.
pub(crate) fn bytes_moved_by_placements<A: Architecture>(
    sizes: &A,
    batch: usize,
    ranks: usize,
) -> u128 {
    let of_matrix = |spec: &ParameterSpec| {
        let shape = spec.module_shape();
        let placement = placement(sizes, &spec.path, &shape, ranks);
        let into = shape.last().copied().unwrap_or_default() as u128;
        match placement {
            Placement::Shard(1) => into,
            Placement::Shard(_) => 2 * into,
            _ => 0,
        }
    };
    let table = sizes.parameters();
    let moved: u128 = table.iter().map(of_matrix).sum();
    // A tied head multiplies with the embedding's columns, so its logits are sums.
    let logits = match (sizes.tied_head(), table.first()) {
        (Some(_), Some(embedding)) => 2 * embedding.shape[0] as u128,
        _ => 0,
    };
    size_of::<f32>() as u128 * batch as u128 * (moved + logits)
}

impl<'a, Be: BackendIr> PlacedDecoder<'a, Be> {
    /// Divides the weights that `read` returns among the ranks, for up to `batch` sequences at once. They are on the
    /// sample's device, which is `on` for the backend. Collective.
    pub(crate) fn new<A: Architecture>(
        (sizes, model): (A, &ModelConfig),
        sample: &'a Sample<'a>,
        batch: usize,
        world: &ProcessGroup,
        on: Be::Device,
        mut read: impl FnMut(&ShardSpec<'_>) -> Result<Vec<f32>, RankError>,
    ) -> Result<Self, RankError> {
        let ranks = world.size();
        let mesh = ProcessMesh::new(world, Mesh::line(AXIS, ranks)?)?;
        let all = model.kv_heads();
        let (heads, of_heads) = if all.is_multiple_of(ranks) {
            let own = all / ranks;
            let start = world.rank() * own;
            (start..start + own, Placement::Shard(1))
        } else {
            (0..all, Placement::Replicate)
        };
        let mut expand = Expand::new()
            .input("**", AXIS, Placement::Replicate)
            .input("2.**", AXIS, of_heads);
        for spec in sizes.parameters() {
            let placement = placement(&sizes, &spec.path, &spec.shape, ranks);
            expand = expand.parameter(&spec.path, AXIS, placement);
        }
        sizes.validate()?;
        let init = move |device: &Device| sizes.blank(device).expect("the sizes were validated");
        let values = |part: &ShardSpec<'_>| {
            let values = TensorData::new(read(part)?, part.shape.clone());
            Ok::<_, RankError>(Some(values))
        };
        let mode = Mode::expand(mesh, expand).cache(NUM_GRAPHS);
        // Nothing is trained, so the loss is never computed.
        let loss = |_: &A::Model, (): ()| Tensor::<1>::zeros([1], &Device::flex());
        let optimizer = SgdConfig::new().build();
        let device = &sample.device;
        let step = compile_on::<Be, _, _, _, _, (), RankError>(
            (init, values),
            loss,
            optimizer,
            mode,
            (),
            (device, on),
        )?;
        let form = RowsForm {
            rows: batch,
            blocks: model.num_layers(),
            heads,
            head_dim: model.head_dim(),
            window: model.window(),
            device: device.clone(),
        };
        Ok(Self {
            step,
            forward: Evaluation::on(device, init, run::<A::Model>),
            rows: DecodeRows::new(form),
            prompts: vec![None; batch],
            sample,
        })
    }

    /// Gives each sequence a row. Returns the rows, in order.
    fn place(&mut self, sequences: &[Sequence<'_>]) -> Vec<usize> {
        for row in 0..self.prompts.len() {
            let is_left = |prompt| sequences.iter().any(|sequence| sequence.prompt == prompt);
            if self.prompts[row].is_some_and(|prompt| !is_left(prompt)) {
                self.prompts[row] = None;
                self.rows.clear(row);
            }
        }
        let places = sequences.iter().map(|sequence| {
            let wanted = [Some(sequence.prompt), None];
            let mut found = wanted
                .iter()
                .filter_map(|wanted| self.prompts.iter().position(|of| of == wanted));
            let row = found.next().expect("at most as many sequences as rows");
            self.prompts[row] = Some(sequence.prompt);
            row
        });
        places.collect()
    }
}

/// Runs the model on tensors only.
fn run<M: LanguageModel>(model: &M, inputs: Inputs) -> Outputs {
    let ((tokens, positions, last), (hidden, hidden_in_window), kept) = inputs;
    let decoded = decode(
        model,
        DecodeInputs {
            tokens,
            positions,
            last,
            hidden,
            hidden_in_window,
            kept,
        },
    );
    (decoded.logits, decoded.new)
}

impl<Be: BackendIr> Decoder for PlacedDecoder<'_, Be>
where
    DispatchTensor: DispatchKindConversion<Be>,
{
    fn is_joint(&self) -> bool {
        true
    }

    fn next_logits(&mut self, sequences: &[Sequence<'_>]) -> Result<Vec<Vec<f32>>, RankError> {
        let places = self.place(sequences);
        let mut new = vec![Vec::new(); self.prompts.len()];
        for (sequence, row) in sequences.iter().zip(&places) {
            let seen = self.rows.num_tokens(*row);
            let (tokens, seen) = seen_tokens(sequence.tokens, seen, self.sample.seq);
            if seen == 0 {
                self.rows.clear(*row);
            }
            new[*row] = tokens[seen..].to_vec();
        }
        let (step, forward) = (&mut self.step, &mut self.forward);
        let mut logits = self.rows.advance(new, |inputs| {
            let inputs = inputs.clone();
            let inputs = (
                (inputs.tokens, inputs.positions, inputs.last),
                (inputs.hidden, inputs.hidden_in_window),
                inputs.kept,
            );
            let (logits, new) = step.evaluate_on_device(forward, &inputs)?;
            Ok::<_, RankError>(Decoded { logits, new })
        })?;
        let own = places.iter().map(|row| std::mem::take(&mut logits[*row]));
        Ok(own.map(|logits| known(self.sample, logits)).collect())
    }

    fn num_bytes(&self) -> usize {
        self.rows.num_bytes()
    }
}

#[cfg(test)]
mod tests;
