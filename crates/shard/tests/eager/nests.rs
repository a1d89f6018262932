//! Regions with any number of inputs and outputs, compared with plain Burn.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::{gelu, sigmoid};
use burn::tensor::{Bool, DType, Device, Gradients, Int, Tensor, TensorData};
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch, launcher_ranks};
use burn_fsdp_shard::{
    Error, ShardPolicy, Strategy, backward, catch, fully_shard, into_record, local_ids, recompute,
    settle_ids,
};

use super::bench::{
    Case, Outcome, SEED, assert_close, build, joined, on_ranks, optimizer, params, plain_device,
    plainly, seeded, sharded, whole_params,
};
use super::launcher;
use super::nets::{Block, MLP, Mlp, input, tokens};

#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

impl Pair {
    fn new(device: &Device) -> Self {
        let pair = Self {
            first: LinearConfig::new(5, 5).init(device),
            second: LinearConfig::new(5, 3).init(device),
        };
        seeded(pair, 3)
    }
}

fn device() -> Device {
    plain_device().autodiff()
}

fn leaf<const D: usize>(shape: [usize; D], number: usize) -> Tensor<D> {
    input(shape, number, 1, &device()).require_grad()
}

/// The bits of a gradient, and its type.
fn bits<const D: usize>(gradient: Option<Tensor<D>>) -> Option<(DType, Vec<u8>)> {
    gradient.map(|gradient| {
        let data = gradient.into_data();
        (data.dtype(), data.as_bytes().to_vec())
    })
}

type Bits = Vec<Option<(DType, Vec<u8>)>>;

fn of_module(pair: &Pair, gradients: Gradients) -> Bits {
    let gradients = GradientsParams::from_grads(gradients, pair);
    [&pair.first, &pair.second]
        .into_iter()
        .flat_map(|linear| {
            let bias = linear.bias.as_ref().map(|bias| bias.id);
            [
                bits(gradients.get::<2>(linear.weight.id)),
                bits(bias.and_then(|bias| gradients.get::<1>(bias))),
            ]
        })
        .collect()
}

type Input = (
    Tensor<2>,
    Vec<Tensor<1>>,
    Option<Tensor<3>>,
    [Tensor<2>; 2],
    Tensor<1, Int>,
    Tensor<2, Bool>,
);

type Output = (
    Tensor<2>,
    Vec<Tensor<3>>,
    Option<Tensor<1>>,
    Tensor<1, Int>,
    (Tensor<2, Bool>, [Tensor<2>; 1]),
);

fn nested(pair: &Pair, input: Input) -> Output {
    let (x, shifts, scale, [left, right], places, mask) = input;
    let hidden = gelu(pair.first.forward(x));
    let hidden = shifts
        .into_iter()
        .fold(hidden, |hidden, shift| hidden + shift.unsqueeze());
    let chosen = pair
        .second
        .forward(hidden.clone())
        .select(0, places.clone());
    let product = left * right.clone();
    let scaled = scale.map(|scale| scale.clone() * sigmoid(scale));
    let masked = right.mask_fill(mask.clone(), 0.0);
    let sum = product.sum_dim(1).squeeze::<1>();
    let cube = hidden.unsqueeze::<3>();
    let cubes = scaled.into_iter().chain([cube]).collect();
    (chosen, cubes, Some(sum), places + 1, (mask, [masked]))
}

/// The bits of all gradients, of leaves and of the module, with `nested` in a region or not.
fn of_nests(run: fn(&Pair, Input) -> Output, has_scale: bool) -> Bits {
    let pair = Pair::new(&device());
    let x = leaf([4, 5], 1);
    let shifts = [leaf([5], 2), leaf([5], 3)];
    let scale = leaf([2, 3, 4], 4);
    let sides = [leaf([4, 5], 5), leaf([4, 5], 6)];
    let places = Tensor::<1, Int>::from_data([2, 0, 2], &device());
    let mask = sides[0].clone().inner().greater_elem(0.0);
    let mask = Tensor::<2, Bool>::from_data(mask.into_data(), &device());
    let given = (
        // A tensor with a graph of its own, a leaf, and a tensor that gets two gradients.
        x.clone().tanh(),
        shifts.to_vec(),
        has_scale.then(|| scale.clone().mul_scalar(2.0)),
        [sides[0].clone(), sides[1].clone() + sides[0].clone()],
        places,
        mask,
    );
    let (chosen, cubes, sum, next, (mask, [masked])) = run(&pair, given);
    assert_eq!(
        next.into_data().iter::<i64>().collect::<Vec<_>>(),
        [3, 1, 3]
    );
    assert!(mask.into_data().iter::<bool>().any(|masked| masked));
    let mut loss = chosen.square().sum() + masked.sum().mul_scalar(0.3);
    for cube in cubes {
        loss = loss + cube.powi_scalar(3).sum();
    }
    if let Some(sum) = sum {
        loss = loss + sum.clone().exp().sum() + (sum * shifts[0].clone().slice(0..4)).sum();
    }
    let gradients = loss.backward();
    let mut found: Bits = vec![bits(x.grad(&gradients)), bits(scale.grad(&gradients))];
    found.extend(shifts.map(|shift| bits(shift.grad(&gradients))));
    found.extend(sides.map(|side| bits(side.grad(&gradients))));
    found.extend(of_module(&pair, gradients));
    found
}

/// Tuples, vectors, options, arrays, ints and bools are inputs and outputs, and each float tensor gets its gradient.
#[test]
fn nests_have_the_gradients_of_plain_burn() {
    for has_scale in [false, true] {
        let want = of_nests(nested, has_scale);
        let got = of_nests(|pair, input| recompute(pair, input, nested), has_scale);
        assert_eq!(want.iter().flatten().count(), 9 + usize::from(has_scale));
        assert_eq!(got, want);
    }
}

/// Inputs and outputs of several types keep their bits.
#[test]
fn mixed_types_keep_their_bits() {
    type Mixed = (Tensor<1>, Tensor<2>, Tensor<2>);
    fn mixed(_: &Pair, (narrow, half, wide): Mixed) -> Mixed {
        let product = half.clone() * half.exp();
        let joined = wide * product.clone().cast(DType::F32);
        (narrow.clone() / (narrow + 3.0), product, joined)
    }
    let of = |run: fn(&Pair, Mixed) -> Mixed| {
        let pair = Pair::new(&device());
        let [narrow, half, wide] = [DType::BF16, DType::F16, DType::F32].map(|dtype| {
            let leaf = input([3, 5], 2, 1, &device()).cast(dtype);
            leaf.detach().require_grad()
        });
        let given = (narrow.clone().reshape([15]), half.clone(), wide.clone());
        let (a, b, c) = run(&pair, given);
        assert_eq!(
            [a.dtype(), b.dtype(), c.dtype()],
            [DType::BF16, DType::F16, DType::F32]
        );
        let loss = a.cast(DType::F32).sum() + b.cast(DType::F32).square().sum() + c.exp().sum();
        let gradients = loss.backward();
        [narrow, half, wide].map(|leaf| bits(leaf.grad(&gradients)))
    };
    let want = of(mixed);
    assert!(want.iter().all(Option::is_some));
    assert_eq!(of(|pair, given| recompute(pair, given, mixed)), want);
}

/// A forward over three tensors, with three results.
type Three = fn(&Pair, [Tensor<2>; 3]) -> [Tensor<2>; 3];

/// The gradients of three inputs and the module. `tracked` selects the inputs with gradients, `used` the outputs that
/// the loss uses, and `deep` makes the inputs results of operations.
fn of_three(
    three: Three,
    is_region: bool,
    tracked: [bool; 3],
    used: [bool; 3],
    is_deep: bool,
) -> Bits {
    let pair = Pair::new(&device());
    let leaves = [0, 1, 2]
        .map(|number| input([2, 5], number, 1, &device()).set_require_grad(tracked[number]));
    let given = leaves
        .clone()
        .map(|leaf| if is_deep { leaf.sin() } else { leaf });
    let results = if is_region {
        recompute(&pair, given, three)
    } else {
        three(&pair, given)
    };
    let parameters = pair.second.weight.val().sum();
    let loss = results
        .into_iter()
        .zip(used)
        .filter(|(_, used)| *used)
        .fold(parameters, |sum, (result, _)| sum + result.square().sum());
    let gradients = loss.backward();
    let mut found: Bits = leaves.map(|leaf| bits(leaf.grad(&gradients))).to_vec();
    found.extend(of_module(&pair, gradients));
    found
}

/// Inputs without gradients, untouched outputs, outputs that depend on no input, and outputs without use.
#[test]
fn partly_tracked_nests_have_the_gradients_of_plain_burn() {
    let threes: [Three; 3] = [
        |pair, [a, b, c]| [pair.first.forward(a) * b.clone(), b, c.exp()],
        // The second input is returned untouched, and the third output is a constant.
        |pair, [a, b, c]| [pair.first.forward(a * c), b.clone(), b.ones_like()],
        // No output depends on an input, and one depends on the module.
        |pair, [a, b, c]| {
            [
                pair.first.forward(a.zeros_like()),
                b.ones_like(),
                c.ones_like(),
            ]
        },
    ];
    let flags = |bits: usize| [0, 1, 2].map(|index| bits >> index & 1 == 1);
    for (number, three) in threes.into_iter().enumerate() {
        for (tracked, used) in (0..8).flat_map(|tracked| (0..8).map(move |used| (tracked, used))) {
            for is_deep in [false, true] {
                let of =
                    |is_region| of_three(three, is_region, flags(tracked), flags(used), is_deep);
                let (got, want) = (of(true), of(false));
                for (place, (got, want)) in got.into_iter().zip(want).enumerate() {
                    let what = format!("{number}, {tracked:b}, {used:b}, {is_deep}, {place}");
                    // A region that backward visits passes zeros to inputs that its loss does not depend on.
                    let is_zero = |(_, bits): &(DType, Vec<u8>)| bits.iter().all(|&byte| byte == 0);
                    let got = got.filter(|got| want.is_some() || !is_deep || !is_zero(got));
                    assert_eq!(got.is_some(), want.is_some(), "{what}");
                    if let (Some((dtype, got)), Some((_, want))) = (got, want) {
                        // Sums of more than two gradients may be added in another order.
                        let [got, want] = [got, want].map(|bits| {
                            TensorData::from_bytes_vec(bits.clone(), [bits.len() / 4], dtype)
                        });
                        got.assert_approx_eq::<f32>(&want, burn::tensor::Tolerance::relative(1e-6));
                    }
                }
            }
        }
    }
}

/// A tensor that would be an error if captured gets its gradient as an input.
#[test]
fn inputs_replace_captured_tensors() {
    let pair = Pair::new(&device());
    let (x, factor) = (leaf([2, 5], 0), leaf([2, 5], 1));
    let captured = {
        let factor = factor.clone();
        let x = x.clone();
        catch(|| {
            recompute(&pair, (x,), move |pair: &Pair, (x,)| {
                (pair.first.forward(x.clone()), x * factor.clone())
            })
        })
    };
    let message = captured.err().map(|error| error.to_string());
    let message = message.unwrap_or_default();
    assert!(
        message.contains("pass it in the region's input"),
        "{message}"
    );

    let forward = |pair: &Pair, (x, factor): (Tensor<2>, Tensor<2>)| pair.first.forward(x) * factor;
    let of = |loss: Tensor<2>| {
        let gradients = loss.sum().backward();
        [&x, &factor].map(|leaf| bits(leaf.grad(&gradients)))
    };
    let given = (x.clone(), factor.clone());
    let want = of(forward(&pair, given.clone()));
    assert_eq!(of(recompute(&pair, given, forward)), want);
}

/// A second forward that returns other tensors is an error.
#[test]
fn other_outputs_in_backward_are_errors() {
    let pair = Pair::new(&device());
    let runs = AtomicUsize::new(0);
    let outputs = recompute(&pair, leaf([2, 5], 0), move |pair: &Pair, x| {
        let number = 2 + runs.fetch_add(1, Ordering::Relaxed);
        vec![pair.first.forward(x); number]
    });
    let loss = outputs
        .into_iter()
        .map(Tensor::sum)
        .reduce(|sum, part| sum + part);
    let loss = loss.expect("two outputs");
    let message = catch(|| loss.backward())
        .err()
        .map(|error| error.to_string());
    let message = message.unwrap_or_default();
    assert!(
        message.contains("tensors of the shapes [[2, 5], [2, 5], [2, 5]]"),
        "{message}"
    );
}

/// A region from tokens to the first block, and regions that carry a sum beside the blocks' input.
fn carried(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let tokens = tokens([2, 4], 11, rank, step, device);
    let x = recompute(
        &model.embed,
        tokens,
        |embed: &burn::nn::Embedding, tokens| embed.forward(tokens),
    );
    let mut state = (x.clone(), vec![x]);
    for block in &model.blocks {
        state = recompute(block, state, |block: &Block, (x, mut sums)| {
            let x = block.forward(x);
            sums.push(x.clone() * 0.5);
            (x, sums)
        });
    }
    let (x, sums) = state;
    let x = sums.into_iter().fold(x, |x, part| x + part);
    model.head.forward(model.norm.forward(x)).square().mean()
}

/// The same, without regions.
fn carried_plainly(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let tokens = tokens([2, 4], 11, rank, step, device);
    let mut x = model.embed.forward(tokens);
    let mut sums = vec![x.clone()];
    for block in &model.blocks {
        x = block.forward(x);
        sums.push(x.clone() * 0.5);
    }
    let x = sums.into_iter().fold(x, |x, part| x + part);
    model.head.forward(model.norm.forward(x)).square().mean()
}

#[test]
fn nests_train_in_sharded_modules() {
    let plain = Case {
        loss: carried_plainly,
        ..MLP
    };
    let regions = Case {
        loss: carried,
        ..MLP
    };
    let policies = [
        ShardPolicy::new().units(["embed", "blocks.*", "head"]),
        ShardPolicy::new()
            .units(["blocks.*"])
            .strategy(Strategy::ShardGradOp),
        ShardPolicy::new(),
    ];
    for ranks in 1..=4 {
        let want = plainly(plain, ranks, 6);
        assert_close(&plainly(regions, ranks, 6), &want, 1e-5);
        for policy in &policies {
            assert_close(&sharded(regions, ranks, 6, policy.clone()), &want, 1e-5);
        }
    }
}

/// A region over two modules that are sharded separately, each with its own root.
#[test]
fn regions_use_modules_of_several_roots() {
    fn loss(pair: &Pair, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let x = input([4, 5], rank, step, device);
        let hidden = gelu(pair.first.forward(x));
        pair.second.forward(hidden).square().mean()
    }
    let case = Case {
        build: Pair::new,
        loss,
    };
    for ranks in 1..=3 {
        let want = plainly(case, ranks, 4);
        let outcomes = on_ranks(ranks, move |world| {
            let device = super::bench::device();
            let pair = seeded(Pair::new(&device), SEED);
            let mut pair = Pair {
                first: fully_shard(pair.first, &world, ShardPolicy::new())?,
                second: fully_shard(pair.second, &world, ShardPolicy::new())?,
            };
            let mut optim = optimizer();
            let mut losses = Vec::new();
            for step in 0..4 {
                let x = input([4, 5], world.rank(), step, &device);
                let outputs = recompute(&pair, (x,), |pair: &Pair, (x,)| {
                    let hidden = gelu(pair.first.forward(x));
                    vec![pair.second.forward(hidden)]
                });
                let loss = outputs[0].clone().square().mean();
                losses.push(loss.clone().into_scalar::<f32>());
                let gradients = backward(loss, &pair)?;
                pair = optim.step(1e-2, pair, gradients);
            }
            let params = whole_params(Pair::new(&device), &pair);
            Ok(Outcome { losses, params })
        });
        assert_close(&joined(&outcomes), &want, 1e-5);
    }
}

#[derive(Module, Debug)]
struct Dropping {
    linear: Linear,
    dropout: Dropout,
}

/// Ranks that are processes draw the same dropout masks twice, each its own. The region returns its mask, with which
/// plain Burn has the same gradients.
#[test]
fn processes_repeat_dropout_masks() {
    if launcher::scene().is_none() {
        for processes in [1, 2] {
            launcher::again_as_processes(processes, "nests::processes_repeat_dropout_masks");
        }
        return;
    }
    let ranks = launcher_ranks().expect("started among others");
    let body = |world: ProcessGroup| {
        let device = device();
        let build = || Dropping {
            linear: seeded(LinearConfig::new(6, 6).init(&device), 4),
            dropout: DropoutConfig::new(0.5).init(),
        };
        let (mut plain, mut optim) = (build(), SgdConfig::new().init());
        let mut model = fully_shard(build(), &world, ShardPolicy::new())?;
        device.seed(11 + world.rank() as u64);
        for step in 0..3 {
            let x = input([5, 6], world.rank(), step, &device);
            let given = (x.clone(), x.ones_like());
            let (dropped, other) = recompute(&model, given, |model: &Dropping, (x, ones)| {
                let y = model.linear.forward(x).exp();
                (model.dropout.forward(y), model.dropout.forward(ones))
            });
            let mask = dropped.clone().inner().not_equal_elem(0.0).float() * 2.0;
            // Each dropout of a region draws its own mask.
            assert!(mask.clone().into_data() != other.inner().into_data());
            let gradients = backward(dropped.square().mean(), &model)?;
            model = optim.step(1.0, model, gradients);

            let mask = Tensor::<2>::from_data(mask.into_data(), &device);
            let loss = (plain.linear.forward(x).exp() * mask).square().mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &plain);
            let gradients = averaged(&plain, &gradients, &world)?;
            plain = SgdConfig::new().init().step(1.0, plain, gradients);
            let outcome = |params| Outcome {
                losses: Vec::new(),
                params,
            };
            let got = outcome(whole_params(build(), &model));
            assert_close(&got, &outcome(params(&plain)), 1e-5);
        }
        Ok::<_, Error>(())
    };
    launch(LaunchConfig::new(ranks), body).unwrap_or_else(|error| panic!("{error}"));
}

/// The mean of the ranks' gradients of a linear layer.
fn averaged(
    plain: &Dropping,
    gradients: &GradientsParams,
    world: &ProcessGroup,
) -> Result<GradientsParams, Error> {
    fn mean<const D: usize>(
        param: &Param<Tensor<D>>,
        gradients: &GradientsParams,
        world: &ProcessGroup,
        into: &mut GradientsParams,
    ) -> Result<(), Error> {
        let own = gradients.get::<D>(param.id).expect("used").into_data();
        let all = world.exchange("gradients", own.as_bytes().to_vec())?;
        let parts = all.into_iter().map(|bytes| {
            let data = TensorData::from_bytes_vec(bytes, own.shape().clone(), own.dtype());
            Tensor::<D>::from_data(data, &plain_device())
        });
        let sum = parts.reduce(|sum, part| sum + part).expect("a rank");
        into.register(param.id, sum.div_scalar(world.size() as f32));
        Ok(())
    }
    let mut means = GradientsParams::new();
    mean(&plain.linear.weight, gradients, world, &mut means)?;
    let bias = plain.linear.bias.as_ref().expect("a bias");
    mean(bias, gradients, world, &mut means)?;
    Ok(means)
}

/// An embedding, and a layer whose weight is recorded as it is.
#[derive(Module, Debug)]
struct Words {
    embed: Embedding,
    head: Linear,
}

const WORDS: Case<Words> = Case {
    build: |device| Words {
        embed: EmbeddingConfig::new(11, 5).init(device),
        head: LinearConfig::new(5, 3).init(device),
    },
    loss: |words, rank, step, device| {
        let words = words
            .head
            .forward(words.embed.forward(tokens([2, 4], 11, rank, step, device)));
        words.powf_scalar(2.0).mean()
    },
};

/// A region whose input has no floats looks for a device in its module, and leaves the parameters' ids alone.
#[test]
fn a_region_of_ints_keeps_ids() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(WORDS, &world, &device, ShardPolicy::new())?;
        settle_ids(&model);
        let record = into_record(model.clone())?;
        let model = model.load_record(record);
        let ints = tokens([2, 4], 11, 0, 0, &device);
        recompute(
            &model.embed,
            ints,
            |embed: &Embedding, ints: Tensor<2, Int>| embed.forward(ints),
        );
        let ids: Vec<_> = local_ids(&model)?.iter().map(|local| local.id).collect();
        let distinct: HashSet<_> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len());
        Ok(())
    });
}
