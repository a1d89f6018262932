//! Modules that Burn's `apply_lora` has adapted before they are sharded, compared with Burn's own on one rank.

use burn::module::{
    Lora, Module, ModuleMapper, Param, ParamGroup, QLora, Quantizer, Reparameterization,
    Reparameterizer,
};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_shard::{
    Error, ShardPolicy, Strategy, WriteBack, backward, fully_shard, local_ids, summon_full_params,
    unsharded,
};

use super::base_bits::{self, BOTH, Net};
use super::bench::{
    Outcome, SEED, assert_close, device, joined, on_ranks, optimizer, panic_of, params,
    plain_device, seeded, trained_plainly,
};
use super::lora::{Factors, adapters, blocks, in_rows, outcome, plain, plainly};
use super::nets::Mlp;

/// Trains for four steps.
fn stepped<M: Module>(
    world: &ProcessGroup,
    mut model: M,
    loss: fn(&M, usize, usize, &Device) -> Tensor<1>,
) -> Result<(M, Vec<f32>), Error> {
    let mut optim = optimizer();
    let mut losses = Vec::new();
    for step in 0..4 {
        let loss = loss(&model, world.rank(), step, &device());
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = backward(loss, &model)?;
        model = optim.step(1e-2, model, gradients);
    }
    Ok((model, losses))
}

#[test]
fn adapters_of_burn_train_as_unsharded() {
    for ranks in 1..=4 {
        let want = plainly(ranks, 4);
        let tolerance = if ranks == 1 { 0.0 } else { 1e-5 };
        for policy in [
            blocks(),
            ShardPolicy::new(),
            blocks().reshard_root(true).prefetch(2),
            blocks().strategy(Strategy::ShardGradOp),
            blocks().strategy(Strategy::NoShard),
            blocks().one_owner(["**.lora"]),
            blocks().shard_vectors(true),
        ] {
            let adapted = plain(&device(), adapters());
            let got = joined(&on_ranks(ranks, move |world| {
                let model = fully_shard(adapted.clone(), &world, policy.clone())?;
                let (model, losses) = stepped(&world, model, Mlp::loss)?;
                Ok(outcome(&model, losses))
            }));
            assert_close(&got, &want, tolerance);
        }
    }
}

/// A mapper that sets factors.
#[derive(Default)]
struct Halves {
    path: Vec<String>,
}

impl ModuleMapper for Halves {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.path.iter().any(|name| name == "lora") {
            param.map(|old| old.ones_like() * 0.5)
        } else {
            param
        }
    }
}

/// Adapters of all matrices, of which one is laid out in columns.
#[test]
fn plain_copies_have_the_adapters_again() {
    let adapted = |device: &Device| {
        let model = seeded(Mlp::new(device), SEED).apply_lora(Lora::new(3, 4.0));
        model.map(&mut Factors::default())
    };
    for ranks in 1..=3 {
        let device = plain_device().autodiff();
        let want = trained_plainly(adapted(&device), Mlp::loss, &device, [ranks, 4]);
        let model = adapted(&super::bench::device());
        for (first, copies, back) in on_ranks(ranks, move |world| {
            let scale = |model: &Mlp| model.head.weight.adapter().map(|adapter| adapter.scale);
            let model = fully_shard(model.clone(), &world, blocks())?;
            let (model, _) = stepped(&world, model, Mlp::loss)?;
            let whole = unsharded(&model, world.rank() == 0)?;
            let mut summoned = None;
            let model = summon_full_params(model, WriteBack::Keep, |full| {
                summoned = Some(full.clone());
                full.map(&mut Halves::default())
            })?;
            let copies = [Some(summoned.expect("summoned")), whole]
                .into_iter()
                .flatten();
            let copies: Vec<_> = copies.collect();
            for copy in &copies {
                assert_eq!(scale(copy), Some(4.0 / 3.0));
            }
            let mut back = None;
            summon_full_params(model, WriteBack::Discard, |full| {
                back = Some(params(&full));
                full
            })?;
            let copies: Vec<_> = copies.iter().map(params).collect();
            Ok((world.rank() == 0, copies, back.expect("summoned")))
        }) {
            assert_eq!(copies.len(), 1 + usize::from(first));
            for params in copies {
                let losses = want.losses.clone();
                assert_close(&Outcome { losses, params }, &want, 1e-5);
            }
            let factors = |params: &[(String, Vec<f32>)]| {
                let all = params.iter().filter(|(path, _)| path.contains(".lora."));
                all.cloned().collect::<Vec<_>>()
            };
            let back = factors(&back);
            assert_eq!(back.len(), 2 * 11);
            assert!(
                back.iter()
                    .flat_map(|(_, values)| values)
                    .all(|value| *value == 0.5)
            );
        }
    }
}

/// The ids of factors stay, and so does what is trained: a bias that was unfrozen, and no factor that was frozen.
#[test]
fn a_module_trains_what_it_trained_before() {
    let adapted = |device: &Device| {
        let open = ParamGroup::from_predicate("norm");
        let shut = ParamGroup::from_predicate("up.weight.lora.a");
        let model = plain(device, adapters()).unfreeze_group(open);
        model.freeze_group(shut)
    };
    let device = plain_device().autodiff();
    let frozen = params(&adapted(&device));
    let want = trained_plainly(adapted(&device), Mlp::loss, &device, [2, 4]);
    let model = adapted(&super::bench::device());
    let got = joined(&on_ranks(2, move |world| {
        let adapter = model.blocks[1].gate.weight.adapter();
        let id = adapter.expect("adapted").a.id;
        let sharded = fully_shard(model.clone(), &world, blocks())?;
        assert!(local_ids(&sharded)?.iter().any(|ids| ids.id == id));
        let (model, losses) = stepped(&world, sharded, Mlp::loss)?;
        Ok(outcome(&model, losses))
    }));
    assert_close(&got, &want, 1e-5);
    let differ = |path: &str| {
        let of = |params: &[(String, Vec<f32>)]| {
            let mut found = params.iter().filter(|(name, _)| name == path);
            found.next().expect("named").1.clone()
        };
        of(&frozen) != of(&got.params)
    };
    assert!(differ("blocks.0.norm.gamma") && differ("blocks.0.up.weight.lora.b"));
    assert!(!differ("blocks.0.up.weight.lora.a") && !differ("blocks.0.up.bias"));
}

#[test]
fn a_base_in_fewer_bits_takes_adapters_of_burn() {
    for bits in BOTH {
        let want = base_bits::plainly(bits, 2, 4);
        let model = seeded(Net::new(&device()), SEED).apply_lora(base_bits::adapters());
        let model = base_bits::with_factors(model);
        let got = joined(&on_ranks(2, move |world| {
            let policy = ShardPolicy::new().units(["layers.*"]).base_in(bits);
            let model = fully_shard(model.clone(), &world, policy)?;
            let (model, losses) = stepped(&world, model, Net::loss)?;
            Ok(base_bits::outcome(&model, losses))
        }));
        assert_close(&got, &want, 1e-5);
    }
}

/// A reparameterization of a program's own, under Burn's name for adapters.
#[derive(Module, Debug)]
struct Product {
    a: Param<Tensor<2>>,
    b: Param<Tensor<2>>,
}

impl Reparameterization for Product {
    const NAME: &'static str = "lora";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let product = self.a.val().matmul(self.b.val());
        base.clone() * product.reshape(base.shape())
    }
}

/// Attaches a product to the weight at a path.
struct Attach(&'static str);

impl Reparameterizer for Attach {
    type Reparam = Product;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Product>) {
        if path != self.0 {
            return (param, None);
        }
        let [rows, columns] = [0, 1].map(|dim| param.lazy_shape()[dim]);
        let device = param.lazy_device();
        let product = Product {
            a: Param::from_tensor(Tensor::ones([rows, 1], &device)),
            b: Param::from_tensor(Tensor::ones([1, columns], &device)),
        };
        (param, Some(product))
    }
}

fn refusal(model: Mlp, policy: ShardPolicy) -> String {
    let refused = on_ranks(1, move |world| {
        let refused = fully_shard(model.clone(), &world, policy.clone());
        Ok(refused.expect_err("refused").to_string())
    });
    refused.into_iter().next().expect("one rank")
}

#[test]
fn what_would_lose_or_change_an_adapter_is_refused() {
    let adapted = || plain(&device(), adapters());
    let refused = |model, policy, words: &[&str]| {
        let message = refusal(model, policy);
        for word in words {
            assert!(message.contains(word), "{message}");
        }
    };
    refused(
        adapted(),
        blocks().lora(adapters()),
        &[
            "lora is set",
            "omitted for a module that already has adapters",
            "blocks.0.",
        ],
    );
    refused(adapted(), blocks().dora(adapters()), &["dora is set"]);
    refused(
        adapted(),
        ShardPolicy::new().ignore(["blocks.1"]),
        &["`blocks.1.", "neither ignored"],
    );
    let half = in_rows(&device()).apply_lora(adapters().set_dtype(FloatDType::F16));
    refused(half, blocks(), &["`set_dtype`", "F16"]);
    let other = in_rows(&device()).apply_reparameterization(Attach("head.weight"));
    refused(other, blocks(), &["`head.weight`", "`lora`", "materialize"]);
    let scheme = device().settings().quantization.scheme;
    let quantizer = Quantizer::new(Calibration::MinMax, scheme.with_value(QuantValue::Q8S));
    let quantized = in_rows(&device()).apply_qlora(QLora::new(adapters(), quantizer));
    refused(quantized, blocks(), &["QFloat", "base_in"]);
    on_ranks(1, |world| {
        let mut model = plain(&device(), adapters());
        let head = LinearConfig::new(15, 7).init(&device());
        model.head = fully_shard(head, &world, ShardPolicy::new())?;
        let error = fully_shard(model, &world, blocks()).expect_err("a sharded part");
        for word in [
            "`head.",
            "sharded by an earlier call",
            "`ShardPolicy::units`",
        ] {
            assert!(error.to_string().contains(word), "{error}");
        }
        Ok(())
    });
}

/// The ranks must freeze the same parameters: before the module is sharded, and later.
#[test]
fn a_parameter_frozen_on_one_rank_is_named() {
    let path = "blocks.1.up.weight.lora.a";
    let refused = panic_of(|| {
        on_ranks(2, move |world| {
            let mut model = plain(&device(), adapters());
            if world.rank() == 1 {
                model = model.freeze_group(ParamGroup::from_predicate(path));
            }
            fully_shard(model, &world, blocks())
        })
    });
    assert!(
        refused.contains(&format!("\"{path} initial value, frozen\"")),
        "{refused}"
    );
    let norm = "blocks.1.norm.gamma";
    for (path, change) in [(path, "frozen"), (norm, "unfrozen")] {
        let refused = panic_of(|| {
            on_ranks(2, move |world| {
                let mut model = fully_shard(plain(&device(), adapters()), &world, blocks())?;
                // All ranks change the module, each its own parameters.
                let group = ParamGroup::from_predicate(["nowhere", path][world.rank()]);
                model = match change {
                    "frozen" => model.freeze_group(group),
                    _ => model.unfreeze_group(group),
                };
                backward(model.loss(world.rank(), 0, &device()), &model)
            })
        });
        assert!(
            refused.contains(&format!("with `{path}` {change}")),
            "{refused}"
        );
    }
}

#[derive(Module, Debug)]
struct Twice {
    first: Linear,
    second: Linear,
}

/// Burn gives each of two fields that share a weight an adapter of its own.
#[test]
fn adapters_of_a_shared_weight_are_refused() {
    on_ranks(2, |world| {
        let first: Linear = LinearConfig::new(4, 4).init(&device());
        let second = first.clone();
        let model = Twice { first, second }.apply_lora(Lora::new(2, 1.0));
        let error = fully_shard(model, &world, ShardPolicy::new()).expect_err("shared");
        assert!(error.to_string().contains("`second.weight`"), "{error}");
        Ok(())
    });
}
