//! Any unit may be used or not, in any step, on any rank: random routes, compared with plain Burn on one rank
//! with the mean of the ranks' losses.
//!
//! `BURN_FSDP_LONG=1` runs 200 steps of each instead of 30.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Audit, Error, ShardPolicy, Strategy, backward, catch, fully_shard, no_sync, num_audited,
    replicate,
};

use super::bench::{
    Outcome, SEED, assert_close, device, on_ranks, optimizer, params, seeded, seeded_by_rank,
    whole_params,
};
use super::nets::input;

const DIM: usize = 6;

/// Layers that may be dropped, one expert per rank, a recurrent layer, and a layer that is used up to three
/// times in one forward.
#[derive(Module, Debug)]
struct Net {
    embed: Linear,
    recurrent: Lstm,
    layers: Vec<Linear>,
    experts: Vec<Linear>,
    shared: Linear,
    head: Linear,
}

/// A number below `below` that depends only on the arguments.
fn draw(below: u64, what: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish() % below
}

/// The route of one rank through the module in one forward.
#[derive(Debug)]
struct Route {
    /// True if nothing of the module is used.
    nowhere: bool,
    length: usize,
    layers: Vec<usize>,
    expert: usize,
    num_shared: u64,
    skips_head: bool,
}

impl Route {
    fn of(seed: u64, step: usize, micro: usize, rank: usize) -> Self {
        let draw =
            |below, what: &str, index: usize| draw(below, (seed, step, micro, rank, what, index));
        Self {
            nowhere: draw(12, "nowhere", 0) == 0,
            length: draw(9, "length", 0) as usize,
            layers: (0..4)
                .filter(|&layer| draw(10, "layer", layer) < 7)
                .collect(),
            expert: draw(3, "expert", 0) as usize,
            num_shared: draw(4, "shared", 0),
            skips_head: draw(10, "head", 0) == 0,
        }
    }
}

/// The number of micro-batches in a step; all but the last are without reduction.
fn num_micro(seed: u64, step: usize) -> usize {
    match draw(6, (seed, step, "micro")) {
        0 => 2,
        1 => 3,
        _ => 1,
    }
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(DIM, DIM).init(device);
        Self {
            embed: LinearConfig::new(5, DIM).init(device),
            recurrent: LstmConfig::new(DIM, DIM, true).init(device),
            layers: (0..4).map(|_| linear()).collect(),
            experts: (0..3).map(|_| linear()).collect(),
            shared: linear(),
            head: LinearConfig::new(DIM, 3).init(device),
        }
    }

    fn loss(&self, route: &Route, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        if route.nowhere {
            // There is still a graph, with nothing of the module in it.
            return Tensor::<1>::ones([1], device).require_grad() * 0.5;
        }
        let mut x = gelu(self.embed.forward(input([2, 5], rank, step, device)));
        if route.length > 0 {
            let inputs = input([2, route.length, DIM], rank, step, device);
            let inputs = inputs + x.clone().reshape([2, 1, DIM]);
            let (outputs, _) = self.recurrent.forward(inputs, None);
            let last = outputs.slice([0..2, route.length - 1..route.length]);
            x = x + last.reshape([2, DIM]);
        }
        for (index, &layer) in route.layers.iter().enumerate() {
            x = x.clone() + gelu(self.layers[layer].forward(x));
            if (index as u64) < route.num_shared {
                x = x.clone() + self.shared.forward(x).tanh();
            }
        }
        x = x.clone() + gelu(self.experts[route.expert].forward(x));
        if route.skips_head {
            x.powf_scalar(2.0).mean()
        } else {
            self.head.forward(x).powf_scalar(2.0).mean()
        }
    }

    /// Freezes and unfreezes parts, on all ranks.
    fn staged(mut self, seed: u64, step: usize) -> Self {
        fn switched<M: Module>(module: M, freezes: bool) -> M {
            if freezes {
                module.freeze()
            } else {
                module.unfreeze()
            }
        }
        if draw(4, (seed, step, "stage")) > 0 {
            return self;
        }
        let part = draw(6, (seed, step, "part"));
        let freezes = draw(2, (seed, step, "freezes")) == 0;
        match part {
            0 => self.recurrent = switched(self.recurrent, freezes),
            1 => self.layers = switched(self.layers, freezes),
            2 => self.shared = switched(self.shared, freezes),
            3 => self.head = switched(self.head, freezes),
            number => {
                let chosen = number as usize - 3;
                let layers = self.layers.into_iter().enumerate();
                let layers = layers.map(|(index, layer)| {
                    if index == chosen {
                        switched(layer, freezes)
                    } else {
                        layer
                    }
                });
                self.layers = layers.collect();
            }
        }
        self
    }
}

/// Trains without sharding, with the mean of the ranks' losses.
fn plainly(seed: u64, ranks: usize, steps: usize) -> Outcome {
    let device = Device::flex().autodiff();
    let mut model = seeded(Net::new(&device), SEED);
    let mut optim = optimizer();
    let mut losses = Vec::new();
    for step in 0..steps {
        model = model.staged(seed, step);
        let mut sum: Option<Tensor<1>> = None;
        for micro in 0..num_micro(seed, step) {
            for rank in 0..ranks {
                let route = Route::of(seed, step, micro, rank);
                let loss = model.loss(&route, rank, step, &device);
                sum = Some(match sum {
                    Some(sum) => sum + loss,
                    None => loss,
                });
            }
        }
        let loss = sum.expect("a rank").div_scalar(ranks as f32);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, gradients);
    }
    Outcome {
        losses,
        params: params(&model),
    }
}

/// A mesh of `layout` with hybrid sharding, or of one axis.
fn build(world: &ProcessGroup, layout: Layout) -> Result<Net, Error> {
    let device = device();
    let policy = ShardPolicy::new().units(["layers.*", "experts.*", "recurrent", "shared"]);
    let policy = policy.prefetch(layout.prefetch).audit(Audit::EveryStep);
    let line = || ProcessMesh::new(world, Mesh::line("shard", world.size())?);
    let model = seeded_by_rank(Net::new(&device), world.rank());
    match layout.way {
        Way::Strategy(strategy) => fully_shard(model, &line()?, policy.strategy(strategy)),
        Way::Replicate => replicate(model, &line()?, policy),
        Way::Hybrid => {
            let mesh = Mesh::new([("replicate", 2), ("shard", world.size() / 2)])?;
            let mesh = ProcessMesh::new(world, mesh)?;
            fully_shard(model, &mesh, policy.replicate_axis("replicate"))
        }
        Way::Smaller(ranks) => fully_shard(model, &line()?, policy.reshard_after_forward_to(ranks)),
    }
}

#[derive(Debug, Clone, Copy)]
struct Layout {
    way: Way,
    prefetch: usize,
}

#[derive(Debug, Clone, Copy)]
enum Way {
    Strategy(Strategy),
    Replicate,
    Hybrid,
    Smaller(usize),
}

fn sharded(seed: u64, ranks: usize, steps: usize, layout: Layout) -> Outcome {
    let outcomes = on_ranks(ranks, move |world| {
        let device = device();
        let mut model = build(&world, layout)?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        let mut backwards = 0;
        for step in 0..steps {
            model = model.staged(seed, step);
            let mut total = 0.0;
            let last = num_micro(seed, step) - 1;
            backwards += last as u64 + 1;
            let mut run = |micro| {
                let route = Route::of(seed, step, micro, world.rank());
                let loss = catch(|| model.loss(&route, world.rank(), step, &device))?;
                total += loss.clone().into_scalar::<f32>();
                backward(loss, &model)
            };
            for micro in 0..last {
                no_sync(&model, || run(micro))??;
            }
            let gradients = run(last)?;
            losses.push(total);
            model = optim.step(1e-2, model, gradients);
        }
        assert_eq!(num_audited(&model)?, backwards);
        let params = whole_params(Net::new(&device), &model);
        Ok(Outcome { losses, params })
    });
    let mut first = outcomes[0].clone();
    for outcome in &outcomes {
        assert!(outcome.params == first.params, "ranks agree on every bit");
    }
    for (step, loss) in first.losses.iter_mut().enumerate() {
        let sum: f32 = outcomes.iter().map(|outcome| outcome.losses[step]).sum();
        *loss = sum / ranks as f32;
    }
    first
}

fn agrees(ways: &[Way], ranks: &[usize]) {
    let is_long = std::env::var_os("BURN_FSDP_LONG").is_some();
    let (steps, seeds) = if is_long { (200, 2) } else { (30, 1) };
    for seed in 0..seeds {
        for &ranks in ranks {
            let want = plainly(seed, ranks, steps);
            for &way in ways {
                for prefetch in [1, 0, 3].into_iter().take(1 + 2 * usize::from(is_long)) {
                    let layout = Layout { way, prefetch };
                    let got = sharded(seed, ranks, steps, layout);
                    eprintln!("seed {seed}, {ranks} ranks, {layout:?}, {steps} steps: through");
                    assert_close(&got, &want, 1e-4);
                }
            }
        }
    }
}

#[test]
fn random_routes_under_full_sharding() {
    agrees(&[Way::Strategy(Strategy::FullShard)], &[1, 2, 3, 4]);
}

#[test]
fn random_routes_under_gradient_sharding() {
    agrees(&[Way::Strategy(Strategy::ShardGradOp)], &[2, 3, 4]);
}

#[test]
fn random_routes_under_replication() {
    let ways = [Way::Strategy(Strategy::NoShard), Way::Replicate];
    agrees(&ways, &[2, 3, 4]);
}

#[test]
fn random_routes_under_hybrid_sharding() {
    agrees(&[Way::Hybrid], &[2, 4]);
}

#[test]
fn random_routes_with_weights_kept_by_neighbours() {
    agrees(&[Way::Smaller(2)], &[4]);
}

/// No rank uses a layer in one step, and only one rank in the next.
#[test]
fn an_unused_unit_can_return_on_one_rank() {
    let order = on_ranks(2, |world| {
        let mut model = build(
            &world,
            Layout {
                way: Way::Strategy(Strategy::FullShard),
                prefetch: 1,
            },
        )?;
        let mut optim = optimizer();
        let device = device();
        let mut numbers = Vec::new();
        for step in 0..6 {
            let mut route = Route {
                nowhere: false,
                length: 2,
                layers: vec![0, 1, 2, 3],
                expert: 0,
                num_shared: 0,
                skips_head: false,
            };
            match (step, world.rank()) {
                (3, _) | (4, 1) => route.layers = vec![0, 2, 3],
                _ => {}
            }
            let before = world.counts();
            let loss = model.loss(&route, world.rank(), step, &device);
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
            numbers.push(world.counts().since(&before).total().operations);
        }
        Ok(numbers)
    });
    for numbers in order {
        // Nothing is agreed on again, and nothing is issued twice.
        let (regular, later) = (numbers[1], &numbers[1..]);
        assert!(later.iter().all(|&number| number == regular), "{numbers:?}");
    }
}
