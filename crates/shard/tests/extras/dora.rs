//! Weight-decomposed adapters (DoRA) on sharded weights, compared with the formula in plain Burn on one rank.

use burn::module::{
    Lora, LoraAdapter, Module, ModuleMapper, Param, ParamGroup, Reparameterization, Reparameterizer,
};
use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fsdp_collectives::{Mesh, ProcessMesh};
use burn_fsdp_shard::{
    Error, Precision, ShardPolicy, Strategy, WriteBack, backward, fully_shard, fully_shard_from,
    params_with_gradient, recompute, summon_full_params,
};

use super::bench::{
    Case, Outcome, SEED, assert_close, build, device, joined, on_ranks, optimizer, params,
    plain_device, seeded, trained_plainly, whole_params,
};
use super::nets::{Block, Mlp, tokens};

const MLP: Case<Mlp> = Case {
    build: in_rows,
    loss: Mlp::loss,
};

fn in_rows(device: &Device) -> Mlp {
    Mlp {
        head: LinearConfig::new(15, 7).init(device),
        ..Mlp::new(device)
    }
}

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

fn adapters() -> Lora {
    Lora::new(2, 3.0).set_param_group(ParamGroup::from_predicate("blocks"))
}

/// The formula of the paper, with the norm outside the graph.
#[derive(Module, Debug)]
struct Decomposed {
    a: Param<Tensor<2>>,
    b: Param<Tensor<2>>,
    magnitude: Param<Tensor<1>>,
    scale: f64,
}

fn norms(matrix: &Tensor<2>) -> Tensor<2> {
    (matrix.clone() * matrix.clone()).sum_dim(0).sqrt()
}

impl Reparameterization for Decomposed {
    const NAME: &'static str = LoraAdapter::NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let shape = base.shape();
        let base: Tensor<2> = base.reshape([shape[0], shape[1]]);
        let sum = base + self.a.val().matmul(self.b.val()).mul_scalar(self.scale);
        let constant = norms(&sum).detach();
        let magnitude: Tensor<2> = self.magnitude.val().reshape([1, shape[1]]);
        (sum * (magnitude / constant)).reshape(shape)
    }
}

struct Dora(Lora);

impl Reparameterizer for Dora {
    type Reparam = Decomposed;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Decomposed>) {
        let (param, adapter) = self.0.reparameterize(path, param);
        let decomposed = adapter.map(|LoraAdapter { a, b, scale }| {
            let base = param.base();
            let [rows, columns] = [base.shape()[0], base.shape()[1]];
            let norms = norms(&base.reshape([rows, columns])).reshape([columns]);
            Decomposed {
                a,
                b,
                magnitude: Param::from_tensor(norms.detach()),
                scale,
            }
        });
        (param, decomposed)
    }
}

/// A mapper that gives factors and magnitudes the same values in every run, far from the initial ones.
#[derive(Default)]
struct Moved {
    path: Vec<String>,
    number: usize,
}

impl ModuleMapper for Moved {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.path.iter().any(|name| name == "lora") {
            return param;
        }
        self.number += 1;
        let number = self.number;
        param.map(|old| {
            let len = old.shape().num_elements();
            let values = (0..len).map(|i| ((i * 5 + number * 3) % 11) as f32 / 20.0 - 0.23);
            let values = TensorData::new(values.collect(), old.shape());
            let values = Tensor::from_data(values, (&old.device(), old.dtype()));
            let values = if D == 1 { values + old } else { values };
            values.detach().require_grad()
        })
    }
}

fn plain(device: &Device) -> Mlp {
    let model = seeded(in_rows(device), SEED).apply_reparameterization(Dora(adapters()));
    model.map(&mut Moved::default())
}

/// The parameters after `steps` steps of plain Burn on the joined batch.
fn plainly(ranks: usize, steps: usize) -> Outcome {
    let device = plain_device().autodiff();
    trained_plainly(plain(&device), Mlp::loss, &device, [ranks, steps])
}

fn trained(
    ranks: usize,
    steps: usize,
    policy: &ShardPolicy,
    mesh: fn(usize) -> Mesh,
    loss: fn(&Mlp, usize, usize, &Device) -> Tensor<1>,
) -> Outcome {
    let policy = policy.clone();
    joined(&on_ranks(ranks, move |world| {
        let mesh = ProcessMesh::new(&world, mesh(world.size()))?;
        let model = seeded(in_rows(&device()), SEED);
        let model = fully_shard(model, &mesh, policy.clone().dora(adapters()))?;
        let mut model = model.load_record(plain(&device()).into_record());
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..steps {
            let loss = loss(&model, world.rank(), step, &device());
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        let params = whole_params(plain(&device()), &model);
        Ok(Outcome { losses, params })
    }))
}

fn line(ranks: usize) -> Mesh {
    Mesh::line("shard", ranks).expect("ranks")
}

#[test]
fn decomposed_adapters_match_unsharded_training() {
    for ranks in 1..=4 {
        let want = plainly(ranks, 4);
        for policy in [
            blocks(),
            ShardPolicy::new(),
            ShardPolicy::new().units(["**.up", "blocks.*"]),
            blocks().reshard_root(true).prefetch(2),
            blocks().strategy(Strategy::ShardGradOp),
            blocks().strategy(Strategy::NoShard),
            blocks().one_owner(["**.up"]),
        ] {
            let got = trained(ranks, 4, &policy, line, Mlp::loss);
            assert_close(&got, &want, 1e-5);
        }
    }
    let hybrid = |_: usize| Mesh::new([("replicate", 2), ("shard", 2)]).expect("axes");
    let policy = blocks().replicate_axis("replicate");
    assert_close(
        &trained(4, 3, &policy, hybrid, Mlp::loss),
        &plainly(4, 3),
        1e-5,
    );
}

/// Each of nine matrices has two factors and magnitudes; the weights themselves are frozen.
#[test]
fn factors_and_magnitudes_get_gradients() {
    on_ranks(2, |world| {
        let model = seeded(in_rows(&device()), SEED);
        let model = fully_shard(model, &world, blocks().dora(adapters()))?;
        let model = model.load_record(plain(&device()).into_record());
        let gradients = backward(model.loss(world.rank(), 0, &device()), &model)?;
        assert_eq!(params_with_gradient(&model, &gradients).len(), 27);
        Ok(())
    });
}

#[test]
fn decomposed_adapters_train_in_recomputed_regions() {
    fn loss(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
        for block in &model.blocks {
            x = recompute(block, x, Block::forward);
        }
        let x = model.head.forward(model.norm.forward(x));
        x.powf_scalar(2.0).mean()
    }
    for ranks in [1, 3] {
        let got = trained(ranks, 3, &blocks(), line, loss);
        assert_close(&got, &plainly(ranks, 3), 1e-5);
    }
}

/// Also if each rank reads its own values, and with a column of zeros.
#[test]
fn magnitudes_begin_as_the_norms_of_the_weights() {
    let zeroed = |device: &Device| {
        let mut model = seeded(in_rows(device), SEED);
        let up = &mut model.blocks[0].up;
        up.weight = up.weight.clone().map(|weight| {
            let mask: Vec<f32> = (0..7).map(|column| f32::from(column != 3)).collect();
            weight * Tensor::<1>::from_data(TensorData::from(&mask[..]), device).unsqueeze::<2>()
        });
        model
    };
    let want = zeroed(&plain_device().autodiff()).apply_reparameterization(Dora(adapters()));
    let want: Vec<_> = params(&want)
        .into_iter()
        .filter(|(path, _)| path.ends_with(".lora.magnitude"))
        .collect();
    assert_eq!(want.len(), 9);
    for (ranks, policy) in [
        (1, blocks()),
        (3, blocks()),
        (4, blocks().strategy(Strategy::NoShard)),
        (2, blocks().one_owner(["**.up"])),
    ] {
        let (want, policy) = (want.clone(), policy.dora(adapters()));
        on_ranks(ranks, move |world| {
            let bare = fully_shard(zeroed(&device()), &world, blocks())?;
            let own = fully_shard(zeroed(&device()), &world, policy.clone())?;
            let values = params(&zeroed(&plain_device().autodiff()));
            let read = fully_shard_from(
                in_rows(&device()),
                &world,
                policy.clone(),
                |part| -> Result<_, Error> {
                    let values = values.iter().find(|(path, _)| path == part.path);
                    let part = values.map(|(_, values)| &values[part.range.clone()]);
                    let bytes =
                        |part: &[f32]| part.iter().copied().flat_map(f32::to_ne_bytes).collect();
                    Ok(part.map(bytes))
                },
            )?;
            for model in [own, read] {
                let loss = |model: &Mlp| {
                    let loss = model.loss(0, 0, &device());
                    loss.into_scalar::<f32>()
                };
                let (got, same) = (loss(&model), loss(&bare));
                assert!((got - same).abs() < 1e-6 * same.abs(), "{got}, {same}");
                let gradients = backward(model.loss(world.rank(), 0, &device()), &model)?;
                let plain = seeded(in_rows(&device()), SEED);
                let plain = plain.apply_reparameterization(Dora(adapters()));
                let of = whole_params(plain.clone(), &model);
                let of: Vec<_> = of
                    .into_iter()
                    .filter(|(path, _)| path.ends_with(".lora.magnitude"))
                    .collect();
                for ((path, got), (_, want)) in of.iter().zip(&want) {
                    let pairs = got.iter().zip(want);
                    let is_same = pairs
                        .into_iter()
                        .all(|(got, want)| (got - want).abs() < 1e-6);
                    assert!(is_same, "{path}: {got:?}, {want:?}");
                }
                // A column of zeros has no direction, and stays.
                let model = optimizer().step(1e-2, model, gradients);
                let all = whole_params(plain, &model);
                let is_finite =
                    |(_, values): &(String, Vec<f32>)| values.iter().all(|x| x.is_finite());
                assert!(all.iter().all(is_finite));
            }
            Ok(())
        });
    }
}

#[test]
fn decomposed_adapters_are_merged() {
    let want = params(&plain(&plain_device().autodiff()).materialize());
    for ranks in 1..=3 {
        for (merged, summoned) in on_ranks(ranks, |world| {
            let model = build(MLP, &world, &device(), blocks().dora(adapters()))?;
            let model = model.load_record(plain(&device()).into_record());
            let mut summoned = None;
            let model = summon_full_params(model, WriteBack::Discard, |full| {
                summoned = Some(params(&full));
                full
            })?;
            Ok((params(&model.materialize()), summoned.expect("summoned")))
        }) {
            let outcome = |params: &Vec<(String, Vec<f32>)>| Outcome {
                losses: Vec::new(),
                params: params.clone(),
            };
            assert_close(&outcome(&merged), &outcome(&want), 1e-6);
            assert_eq!(merged, summoned);
        }
    }
}

/// A mapper that makes the squares of weights too large for 16 bits.
struct Larger;

impl ModuleMapper for Larger {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|weight| weight.mul_scalar(1000.0).detach().require_grad())
    }
}

#[test]
fn norms_of_half_precision_do_not_overflow() {
    on_ranks(2, |world| {
        let precision = Precision::new(FloatDType::F16).reduce(FloatDType::F32);
        let weight = |policy: ShardPolicy| {
            let model = seeded(in_rows(&device()), SEED).map(&mut Larger);
            let policy = policy.precision(precision.clone());
            let model = fully_shard(model, &world, policy)?;
            let weight = model.blocks[0].up.weight.val();
            assert_eq!(weight.dtype(), DType::F16);
            let values = weight.into_data().convert::<f32>();
            Ok::<_, Error>(values.try_to_vec::<f32>().expect("numbers"))
        };
        let (got, want) = (weight(blocks().dora(adapters()))?, weight(blocks())?);
        assert!(
            want.iter().map(|x| x * x).sum::<f32>() > 7.0 * 65504.0,
            "too small"
        );
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() <= 2e-3 * want.abs(), "{got}, {want}");
        }
        Ok(())
    });
}

#[test]
fn ranks_with_different_methods_are_reported_at_sharding() {
    let errors = on_ranks(2, |world| {
        let policy = match world.rank() {
            0 => blocks().lora(adapters()),
            _ => blocks().dora(adapters()),
        };
        Ok(build(MLP, &world, &device(), policy)
            .expect_err("they differ")
            .to_string())
    });
    for error in errors {
        assert!(error.contains("adapted at rank 2"), "{error}");
        assert!(error.contains("adapted by DoRA at rank 2"), "{error}");
    }
}
