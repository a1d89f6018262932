//! Adapters of any weight, convolutions included, beside running states, compared with Burn's own on one rank.

use burn::module::{Lora, LoraAdapter, Module, Param, ParamGroup, Reparameterizer};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_shard::{
    BaseBits, Error, ShardPolicy, Strategy, backward, fully_shard, into_record, unsharded,
};

use super::base_bits::{BOTH, changed, rounded, with_factors};
use super::bench::{
    Outcome, SEED, assert_close, device, joined, on_ranks, optimizer, params, plain_device, seeded,
    trained_plainly,
};
use super::nets::input;

/// A convolution of 5 x 2 x 3 x 3, running states, and three matrices in rows, of which the last two have a shape that
/// some factors have, too.
#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    first: Linear,
    second: Linear,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([2, 5], [3, 3]).init(device),
            norm: BatchNormConfig::new(5).init(device),
            first: LinearConfig::new(20, 7).init(device),
            second: LinearConfig::new(7, 3).init(device),
            head: LinearConfig::new(3, 3).init(device),
        }
    }

    fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let x: Tensor<4> = input([2, 2, 4, 4], rank, step, device);
        let x = tanh(self.norm.forward(self.conv.forward(x)));
        let x = tanh(self.first.forward(x.reshape([2, 20])));
        let x = self.head.forward(tanh(self.second.forward(x)));
        x.square().mean()
    }
}

fn adapters() -> Lora {
    Lora::new(3, 4.0)
}

/// Attaches adapters as Burn's `Lora` does, and also to weights with more dims: their product has as many rows as the
/// first dims `rows` of the weight.
struct Every {
    rows: usize,
}

impl Reparameterizer for Every {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        if D <= 2 {
            return adapters().reparameterize(path, param);
        }
        let (shape, device) = (param.base().dims(), param.lazy_device());
        let [rows, columns] =
            [&shape[..self.rows], &shape[self.rows..]].map(|dims| dims.iter().product::<usize>());
        let adapter = LoraAdapter {
            a: Param::from_tensor(Tensor::ones([rows, 2], &device)),
            b: Param::from_tensor(Tensor::ones([2, columns], &device)),
            scale: 0.75,
        };
        (param.set_require_grad(false), Some(adapter))
    }
}

/// The net whose weights all have adapters. The norm is trained, too.
fn adapted(device: &Device, rows: usize, change: fn(&str, Vec<f32>) -> Option<Vec<f32>>) -> Net {
    let net = changed(seeded(Net::new(device), SEED), change);
    let net = net.apply_reparameterization(Every { rows });
    with_factors(net.unfreeze_group(ParamGroup::from_predicate("norm")))
}

fn units() -> ShardPolicy {
    ShardPolicy::new().units(["conv", "first"])
}

/// Trains for three steps. Returns the parameters in a record, and those of the plain copy.
fn trained(world: &ProcessGroup, model: Net, empty: Net) -> Result<[Outcome; 2], Error> {
    let (mut model, mut optim, mut losses) = (model, optimizer(), Vec::new());
    for step in 0..3 {
        let loss = model.loss(world.rank(), step, &device());
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = backward(loss, &model)?;
        model = optim.step(1e-2, model, gradients);
    }
    let copy = unsharded(&model, true)?.expect("kept");
    let recorded = empty.load_record(into_record(model)?);
    let outcome = |net: &Net| Outcome {
        losses: losses.clone(),
        params: params(net),
    };
    Ok([outcome(&recorded), outcome(&copy)])
}

/// The ranks have clones of one module, whose running states are separated when it is sharded.
#[test]
fn adapters_of_convolutions_train_beside_running_states() {
    for (ranks, rows) in [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 3)] {
        let plain = plain_device().autodiff();
        let want = adapted(&plain, rows, |_, _| None);
        let want = trained_plainly(want, Net::loss, &plain, [ranks, 3]);
        for policy in [
            units(),
            units().strategy(Strategy::NoShard),
            units().one_owner(["**"]),
            units().reshard_root(true).shard_vectors(true),
        ] {
            let model = adapted(&device(), rows, |_, _| None);
            let got = on_ranks(ranks, move |world| {
                let sharded = fully_shard(model.clone(), &world, policy.clone())?;
                assert_eq!(sharded.head.weight.dims(), [3, 3]);
                trained(&world, sharded, model.clone())
            });
            let [records, copies]: [Vec<_>; 2] =
                [0, 1].map(|form| got.iter().map(|got| got[form].clone()).collect());
            assert_close(&joined(&records), &want, 1e-5);
            assert_close(&joined(&copies), &want, 1e-5);
        }
    }
}

/// A weight in columns loads a record only while it is lazy.
#[test]
fn a_record_loads_beside_running_states() {
    for ranks in 2..=3 {
        let model = Net {
            first: LinearConfig::new(20, 7)
                .with_layout(LinearLayout::Col)
                .init(&device()),
            ..Net::new(&device())
        };
        for adapted in [true, false] {
            let model = if adapted {
                with_factors(model.clone().apply_lora(adapters()))
            } else {
                model.clone()
            };
            on_ranks(ranks, move |world| {
                let trained = fully_shard(model.clone(), &world, units())?;
                let loss = trained.loss(world.rank(), 0, &device());
                let gradients = backward(loss, &trained)?;
                let trained = optimizer().step(1e-2, trained, gradients);
                let again = fully_shard(model.clone(), &world, units())?;
                let again = again.load_record(into_record(trained.clone())?);
                let [got, want] = [again, trained].map(|model| {
                    let whole = unsharded(&model, true).expect("whole");
                    params(&whole.expect("kept"))
                });
                assert_eq!(got, want);
                Ok(())
            });
        }
    }
}

#[test]
fn a_base_in_fewer_bits_must_be_frozen() {
    let model = Net::new(&device()).apply_lora(adapters());
    let model = model.unfreeze_group(ParamGroup::from_paths(vec!["head.weight"]));
    on_ranks(2, move |world| {
        let policy = units().base_in(BaseBits::Eight);
        let error = fully_shard(model.clone(), &world, policy).expect_err("trained");
        let words = "base_in is set for `head.weight`, which is trained";
        assert!(error.to_string().contains(words), "{error}");
        Ok(())
    });
}

/// The values of the base in 8 or 4 bits.
fn in_bits(bits: BaseBits) -> fn(&str, Vec<f32>) -> Option<Vec<f32>> {
    fn of(bits: BaseBits, path: &str, values: &[f32]) -> Option<Vec<f32>> {
        path.ends_with(".weight").then(|| rounded(bits, values))
    }
    match bits {
        BaseBits::Eight => |path, values| of(BaseBits::Eight, path, &values),
        BaseBits::Four => |path, values| of(BaseBits::Four, path, &values),
    }
}

#[test]
fn the_base_of_a_convolution_has_fewer_bits() {
    for bits in BOTH {
        for ranks in 1..=3 {
            let plain = plain_device().autodiff();
            let want = adapted(&plain, 1, in_bits(bits));
            let want = trained_plainly(want, Net::loss, &plain, [ranks, 3]);
            for policy in [units(), units().one_owner(["**"])] {
                let model = adapted(&device(), 1, |_, _| None);
                let got = on_ranks(ranks, move |world| {
                    let policy = policy.clone().base_in(bits);
                    let sharded = fully_shard(model.clone(), &world, policy)?;
                    trained(&world, sharded, model.clone())
                });
                let got: Vec<_> = got.into_iter().map(|[record, _]| record).collect();
                assert_close(&joined(&got), &want, 1e-5);
            }
        }
    }
}

#[test]
fn adapters_of_the_policy_train_beside_running_states() {
    for ranks in 2..=3 {
        let make = |device: &Device| seeded(Net::new(device), SEED);
        let plain = plain_device().autodiff();
        let want = with_factors(make(&plain).apply_lora(adapters()));
        let want = trained_plainly(want, Net::loss, &plain, [ranks, 3]);
        let model = make(&device());
        let got = on_ranks(ranks, move |world| {
            let sharded = fully_shard(model.clone(), &world, units().lora(adapters()))?;
            let start = with_factors(model.clone().apply_lora(adapters()));
            let sharded = sharded.load_record(start.clone().into_record());
            let (mut model, mut optim, mut losses) = (sharded, optimizer(), Vec::new());
            for step in 0..3 {
                let loss = model.loss(world.rank(), step, &device());
                losses.push(loss.clone().into_scalar::<f32>());
                let gradients = backward(loss, &model)?;
                model = optim.step(1e-2, model, gradients);
            }
            let params = params(&start.load_record(into_record(model)?));
            Ok(Outcome { losses, params })
        });
        assert_close(&joined(&got), &want, 1e-5);
    }
}

fn refusal(model: Net) -> String {
    let refused = on_ranks(1, move |world| {
        let refused = fully_shard(model.clone(), &world, units());
        Ok(refused.expect_err("refused").to_string())
    });
    refused.into_iter().next().expect("one rank")
}

/// Attaches an adapter to one matrix.
struct Attach(LoraAdapter);

impl Reparameterizer for Attach {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        (param, (path == "second.weight").then(|| self.0.clone()))
    }
}

#[test]
fn adapters_that_do_not_fit_are_refused_by_name() {
    let attached = |a: [usize; 2], b: [usize; 2], scale| {
        let [a, b] = [a, b].map(|shape| Param::from_tensor(Tensor::ones(shape, &device())));
        Net::new(&device()).apply_reparameterization(Attach(LoraAdapter { a, b, scale }))
    };
    let refused = |model, words: &[&str]| {
        let message = refusal(model);
        for word in words {
            assert!(message.contains(word), "{message}");
        }
    };
    refused(
        attached([3, 2], [2, 4], 1.0),
        &["`second.weight` of shape [7, 3]", "[3, 2] and [2, 4]"],
    );
    refused(
        attached([3, 1], [1, 3], f64::INFINITY),
        &["apply_lora", "a scale (alpha over rank) of inf"],
    );
    let twice = Net::new(&device())
        .apply_lora(adapters())
        .apply_lora(adapters());
    refused(twice, &["called twice", ".lora.a`", "one `ParamGroup`"]);
}

/// Burn's optimizers update a shared factor only in its first field.
#[test]
fn a_shared_factor_is_refused_by_name() {
    let mut model = Net::new(&device()).apply_lora(adapters());
    let mut adapter = model.head.weight.adapter().expect("adapted").clone();
    adapter.a = Param::from_tensor(Tensor::ones([3, 3], &device()));
    let of_second = LoraAdapter {
        b: adapter.a.clone(),
        ..model.second.weight.adapter().expect("adapted").clone()
    };
    struct Own(Vec<(&'static str, LoraAdapter)>);
    impl Reparameterizer for Own {
        type Reparam = LoraAdapter;

        fn reparameterize<const D: usize>(
            &mut self,
            path: &str,
            param: Param<Tensor<D>>,
        ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
            let own = self.0.iter().find(|(of, _)| *of == path);
            (param, own.map(|(_, adapter)| adapter.clone()))
        }
    }
    let own = Own(vec![("head.weight", adapter), ("second.weight", of_second)]);
    model = Net::new(&device()).apply_reparameterization(own);
    let message = refusal(model);
    for word in [
        "`head.weight.lora.a`",
        "`second.weight.lora.b`",
        "factors of its own",
    ] {
        assert!(message.contains(word), "{message}");
    }
}
