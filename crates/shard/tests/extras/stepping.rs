//! The optimizer's steps in backward with what surrounds the engine: owners, compact and checked states, precision,
//! unmanaged parameters, the trial of the optimizer, the wrapper.

use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdafactorConfig, AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp_collectives::{Check, LaunchConfig, ProcessMesh, launch};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Cut, Error, FullyShardedDataParallel, LowBitOptimizer, Precision, SealedOptimizer, ShardPolicy,
    StateFormat, backward_and_step, fully_shard, recompute,
};

use super::bench::{
    Outcome, Way, assert_same, build, device, on_ranks, optimizer, params, ready, seeded, train_by,
};
use super::nets::{Block, MLP, Mlp, input, tokens};
use super::owners::{Make, WHOLE};

const STEPS: usize = 4;

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// Asserts that both ways give the same bits on each rank, with ranks that compare bytes and with ranks that do not.
fn agree(policy: &ShardPolicy, make: Make, what: &str) {
    for check in [Check::Calls, Check::Agreement] {
        for ranks in 1..=3 {
            let run = |way: Way| {
                let policy = policy.clone();
                let config = LaunchConfig::new(ranks).check(check);
                launch(config.deadline(Duration::from_secs(60)), move |world| {
                    let device = device();
                    let model = build(MLP, &world, &device, policy.clone())?;
                    let (rank, plain) = (world.rank(), (MLP.build)(&device));
                    train_by(way, model, make(), STEPS, plain, |model, step| {
                        (MLP.loss)(model, rank, step, &device)
                    })
                })
                .unwrap_or_else(|error| panic!("{what}: {error}"))
            };
            let (got, want) = (run(Way::InBackward), run(Way::AfterBackward));
            for (got, want) in got.iter().zip(&want) {
                assert_same(got, want, what);
            }
        }
    }
}

#[test]
fn owners_step_whole_tensors_in_backward() {
    for (name, make) in WHOLE {
        agree(&blocks().one_owner(["**"]), make, name);
    }
}

#[test]
fn compact_and_checked_states_step_in_backward() {
    let low_bits: Make = || {
        let adamw = AdamWConfig::new().build();
        LowBitOptimizer::new(adamw, StateFormat::Block8).into()
    };
    let policy = blocks().cut(Cut::Multiples(StateFormat::BLOCK));
    agree(&policy, low_bits, "8-bit states");
    let sealed: Make = || SealedOptimizer::new(AdamWConfig::new().build()).into();
    agree(&blocks(), sealed, "sealed states");
}

#[test]
fn precisions_step_in_backward() {
    let half = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
    agree(&blocks().precision(half), optimizer, "bf16");
    agree(&blocks().gather_in_8_bits(true), optimizer, "8-bit gathers");
}

#[derive(Module, Debug)]
struct Net {
    inner: Linear,
    middle: Linear,
    head: Linear,
}

fn net() -> Net {
    let device = device();
    ready(|| {
        let net = Net {
            inner: LinearConfig::new(4, 5).init(&device),
            middle: LinearConfig::new(5, 5).init(&device),
            head: LinearConfig::new(5, 3).init(&device),
        };
        seeded(net, 3)
    })
}

fn loss(net: &Net, rank: usize, step: usize) -> Tensor<1> {
    let x = net.inner.forward(input([2, 4], rank, step, &device()));
    let y = net.head.forward(net.middle.forward(x));
    y.powf_scalar(2.0).mean()
}

/// Trains a net that `wrap` shards, and returns its plain parameters too.
fn partly_sharded(wrap: fn(Net, &ProcessMesh) -> Result<Net, Error>) {
    let run = |way: Way| {
        on_ranks(2, move |world| {
            let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
            let model = wrap(net(), &mesh)?;
            let rank = world.rank();
            train_by(way, model, optimizer(), STEPS, net(), |model, step| {
                loss(model, rank, step)
            })
        })
    };
    let (got, want) = (run(Way::InBackward), run(Way::AfterBackward));
    for (got, want) in got.iter().zip(&want) {
        assert_same(got, want, "partly sharded");
    }
    assert_ne!(got[0].params, params_of(&net()), "it trains");
}

fn params_of(net: &Net) -> Vec<(String, Vec<f32>)> {
    params(net)
}

#[test]
fn ignored_parameters_step_at_the_end_of_backward() {
    partly_sharded(|net, mesh| {
        let policy = ShardPolicy::new().units(["inner"]).ignore(["head"]);
        fully_shard(net, mesh, policy)
    });
}

/// A module with two roots: its children were sharded, and it was not.
#[test]
fn each_root_of_a_module_steps_its_units() {
    partly_sharded(|net, mesh| {
        Ok(Net {
            inner: fully_shard(net.inner, mesh, ShardPolicy::new())?,
            middle: fully_shard(net.middle, mesh, ShardPolicy::new())?,
            head: fully_shard(net.head, mesh, ShardPolicy::new())?,
        })
    });
}

/// The loss of [`MLP`], with each block in a region.
fn recomputed(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    for block in &model.blocks {
        x = recompute(block, x, |block: &Block, x| block.forward(x));
    }
    model.head.forward(x).powf_scalar(2.0).mean()
}

/// A learning rate of zero defers the trial of the optimizer to a step that runs in backward, here also in a region.
#[test]
fn an_optimizer_of_whole_tensors_is_detected_in_backward() {
    type Loss = fn(&Mlp, usize, usize, &Device) -> Tensor<1>;
    let losses: [Loss; 2] = [Mlp::loss, recomputed];
    for (zeros, loss) in [0, 2].into_iter().zip(losses).chain([(2, losses[0])]) {
        let errors = on_ranks(2, move |world| {
            let device = device();
            let mut model = build(MLP, &world, &device, blocks())?;
            let mut optim: ModuleOptimizer = AdafactorConfig::new().init();
            for step in 0..zeros {
                let loss = loss(&model, world.rank(), step, &device);
                model = backward_and_step(loss, model, &mut optim, 0.0)?;
            }
            let loss = loss(&model, world.rank(), zeros, &device);
            Ok(backward_and_step(loss, model, &mut optim, 1e-2).err())
        });
        for error in errors {
            let message = error.map(|error| error.to_string()).unwrap_or_default();
            // The last block's gradients are the first to arrive.
            assert!(
                message.contains("whole") && message.contains("blocks.2"),
                "{zeros}: {message}"
            );
        }
    }
}

#[test]
fn the_wrapper_steps_in_backward() {
    let run = |way: Option<Way>| {
        let outcomes = on_ranks(2, move |world| {
            let device = device();
            let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
            let net: Mlp = seeded((MLP.build)(&device), 5);
            let mut model = FullyShardedDataParallel::new(net, &mesh, blocks())?;
            let mut optim = optimizer();
            for step in 0..STEPS {
                let loss = (MLP.loss)(&model, world.rank(), step, &device);
                model = match way {
                    Some(way) => way.step(loss, model, &mut optim)?,
                    None => model.backward_and_step(loss, &mut optim, 1e-2)?,
                };
            }
            let plain = (MLP.build)(&device);
            Ok(Outcome {
                losses: Vec::new(),
                params: params(&plain.load_record(model.into_record())),
            })
        });
        outcomes[0].clone()
    };
    let want = run(Some(Way::AfterBackward));
    assert_same(&run(None), &want, "the method");
    assert_same(&run(Some(Way::InBackward)), &want, "the function");
}
