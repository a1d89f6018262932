//! A module whose fields share a parameter, and one that reads a single field for each use.

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, RmsNorm, RmsNormConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ShardPolicy, backward, fully_shard};

use super::bench::{
    Outcome, SEED, Way, assert_close, device, joined, on_ranks, optimizer, params, plain_device,
    ready, seeded, train_by, whole_params,
};
use super::nets::{Block, Mlp, tokens};

/// 11 words, not divisible by 2, 3 or 4 ranks.
const WORDS: usize = 11;

/// The module with one field for the table, which every use reads.
#[derive(Module, Debug)]
pub(crate) struct Once {
    pub(crate) embed: Embedding,
    pub(crate) blocks: Vec<Block>,
    pub(crate) norm: RmsNorm,
}

/// The same module with a field for each use.
#[derive(Module, Debug)]
pub(crate) struct Tied {
    pub(crate) embed: Embedding,
    pub(crate) blocks: Vec<Block>,
    pub(crate) middle: Table,
    pub(crate) norm: RmsNorm,
    pub(crate) head: Table,
}

/// A table of words, `[words, width]`.
#[derive(Module, Debug)]
pub(crate) struct Table {
    pub(crate) weight: Param<Tensor<2>>,
}

impl Once {
    /// The module of one rank, with values that differ from rank 0's.
    pub(crate) fn of_rank(rank: usize, device: &Device) -> Self {
        let made = Self {
            embed: EmbeddingConfig::new(WORDS, 15).init(device),
            blocks: (0..2).map(|_| Mlp::block(device)).collect(),
            norm: RmsNormConfig::new(15).init(device),
        };
        ready(|| seeded(made, SEED + 100 * rank as u64))
    }
}

impl From<Once> for Tied {
    fn from(once: Once) -> Self {
        let table = || Table {
            weight: once.embed.weight.clone(),
        };
        Self {
            middle: table(),
            head: table(),
            embed: once.embed,
            blocks: once.blocks,
            norm: once.norm,
        }
    }
}

/// A module and its loss on one rank's part of a step's batch.
pub(crate) trait Net: Module + 'static {
    fn of_rank(rank: usize, device: &Device) -> Self;
    fn parts(&self) -> (&Embedding, &[Block], &RmsNorm);
    /// Reads the table again for each use.
    fn middle(&self) -> Tensor<2>;
    fn head(&self) -> Tensor<2>;

    fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let (embed, blocks, norm) = self.parts();
        let mut x = embed.forward(tokens([2, 4], WORDS, rank, step, device));
        for (index, block) in blocks.iter().enumerate() {
            x = block.forward(x);
            if index == 0 {
                let scores: Tensor<3> = x.clone().matmul(self.middle().transpose().unsqueeze());
                x = x + scores.matmul(self.middle().unsqueeze()).mul_scalar(0.1);
            }
        }
        let logits: Tensor<3> = norm.forward(x).matmul(self.head().transpose().unsqueeze());
        logits.powf_scalar(2.0).mean()
    }
}

impl Net for Once {
    fn of_rank(rank: usize, device: &Device) -> Self {
        Self::of_rank(rank, device)
    }
    fn parts(&self) -> (&Embedding, &[Block], &RmsNorm) {
        (&self.embed, &self.blocks, &self.norm)
    }
    fn middle(&self) -> Tensor<2> {
        self.embed.weight.val()
    }
    fn head(&self) -> Tensor<2> {
        self.embed.weight.val()
    }
}

impl Net for Tied {
    fn of_rank(rank: usize, device: &Device) -> Self {
        Once::of_rank(rank, device).into()
    }
    fn parts(&self) -> (&Embedding, &[Block], &RmsNorm) {
        (&self.embed, &self.blocks, &self.norm)
    }
    fn middle(&self) -> Tensor<2> {
        self.middle.weight.val()
    }
    fn head(&self) -> Tensor<2> {
        self.head.weight.val()
    }
}

/// Trains [`Once`] on one rank of plain Burn, on the batches of `ranks` ranks.
pub(crate) fn plainly(ranks: usize, steps: usize) -> Outcome {
    plainly_by(ranks, steps, |gradients, _| gradients)
}

/// Trains [`Once`] with gradients changed by `change`.
pub(crate) fn plainly_by(
    ranks: usize,
    steps: usize,
    change: impl Fn(GradientsParams, &Once) -> GradientsParams,
) -> Outcome {
    let device = plain_device().autodiff();
    let mut model = Once::of_rank(0, &device);
    let mut optim = optimizer();
    let mut losses = Vec::new();
    for step in 0..steps {
        let parts = (0..ranks).map(|rank| model.loss(rank, step, &device));
        let sum = parts.reduce(|sum, part| sum + part).expect("a rank");
        let loss = sum.div_scalar(ranks as f32);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = change(gradients, &model);
        model = optim.step(1e-2, model, gradients);
    }
    Outcome {
        losses,
        params: params(&model),
    }
}

/// The policy's mesh over all ranks, of two axes if it has replicas.
pub(crate) fn mesh(world: &ProcessGroup, replicas: usize) -> Result<ProcessMesh, Error> {
    let shards = world.size() / replicas;
    let layout = match replicas {
        1 => Mesh::line("shard", shards)?,
        _ => Mesh::new([("replicate", replicas), ("shard", shards)])?,
    };
    Ok(ProcessMesh::new(world, layout)?)
}

/// The sharded module, built with different values on all ranks except rank 0.
pub(crate) fn build(world: &ProcessGroup, policy: ShardPolicy) -> Result<Tied, Error> {
    let model = Tied::of_rank(world.rank(), &device());
    fully_shard(model, &mesh(world, 1)?, policy)
}

/// Makes a step of [`optimizer`].
pub(crate) fn step(
    model: Tied,
    optim: &mut ModuleOptimizer,
    (rank, number): (usize, usize),
) -> Result<(Tied, f32), Error> {
    let loss = model.loss(rank, number, &device());
    let value = loss.clone().into_scalar::<f32>();
    let gradients = backward(loss, &model)?;
    Ok((optim.step(1e-2, model, gradients), value))
}

/// Trains [`Tied`], sharded over threads.
pub(crate) fn sharded(ranks: usize, replicas: usize, steps: usize, policy: ShardPolicy) -> Outcome {
    let outcomes = on_ranks(ranks, move |world| {
        let model = Tied::of_rank(world.rank(), &device());
        let mut model = fully_shard(model, &mesh(&world, replicas)?, policy.clone())?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for number in 0..steps {
            let (next, loss) = step(model, &mut optim, (world.rank(), number))?;
            losses.push(loss);
            model = next;
        }
        Ok(Outcome {
            losses,
            params: whole(&model),
        })
    });
    joined(&outcomes)
}

/// Trains [`Tied`] one way, with any loss.
pub(crate) fn sharded_by(
    way: Way,
    ranks: usize,
    policy: ShardPolicy,
    loss: impl Fn(&Tied, usize, usize, &Device) -> Tensor<1> + Copy + Send + Sync + 'static,
) -> Outcome {
    joined(&on_ranks(ranks, move |world| {
        let (device, rank) = (device(), world.rank());
        let model = build(&world, policy.clone())?;
        let plain = Tied::of_rank(9, &device);
        train_by(way, model, optimizer(), 4, plain, |model, number| {
            loss(model, rank, number, &device)
        })
    }))
}

/// The whole parameters, each once, of a module whose fields all have equal values.
pub(crate) fn whole(model: &Tied) -> Vec<(String, Vec<f32>)> {
    once(whole_params(Tied::of_rank(9, &device()), model))
}

/// The parameters without the second path and the third, which must have the values of the first.
pub(crate) fn once(all: Vec<(String, Vec<f32>)>) -> Vec<(String, Vec<f32>)> {
    let table = all[0].1.clone();
    let is_other = |path: &str| ["middle.weight", "head.weight"].contains(&path);
    let (others, all): (Vec<_>, Vec<_>) = all.into_iter().partition(|(path, _)| is_other(path));
    assert_eq!(others.len(), 2);
    assert!(
        others.iter().all(|(_, values)| *values == table),
        "one parameter"
    );
    all
}

/// Asserts that a run equals [`plainly`].
pub(crate) fn assert_trained(got: &Outcome, want: &Outcome) {
    assert_close(got, want, 1e-5);
}
