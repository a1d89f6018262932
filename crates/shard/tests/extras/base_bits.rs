//! A frozen base in 8 or 4 bits, compared with Burn's adapters on a base that plain Rust has rounded.

use burn::module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fsdp_collectives::{Mesh, OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_shard::{
    BaseBits, Cut, Error, Precision, ShardPolicy, Strategy, WriteBack, backward, catch,
    fully_shard, fully_shard_from, into_record, load_local_state, local_state, memory,
    moving_average, recompute, reset, summon_full_params,
};

use super::bench::{
    Case, Outcome, SEED, Way, assert_close, assert_same, build, device, joined, on_ranks,
    optimizer, params, plain_device, seeded, train_by, trained_plainly,
};
use super::nets::input;
use super::rounding::{self, NF4};

pub(super) const BOTH: [BaseBits; 2] = [BaseBits::Eight, BaseBits::Four];

/// Matrices of 13 blocks and a part, one of less than a block, vectors, and a head that is not adapted.
#[derive(Module, Debug)]
pub(super) struct Net {
    layers: Vec<Linear>,
    norm: LayerNorm,
    narrow: Linear,
    head: Linear,
}

impl Net {
    pub(super) fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(29, 29).init(device);
        Self {
            layers: (0..2).map(|_| layer()).collect(),
            norm: LayerNormConfig::new(29).init(device),
            narrow: LinearConfig::new(29, 2).init(device),
            head: LinearConfig::new(2, 3).init(device),
        }
    }

    pub(super) fn loss(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let x: Tensor<2> = input([3, 29], rank, step, device);
        let layers = self.layers.iter();
        let x = layers.fold(x, |x, layer| x.clone() + gelu(layer.forward(x)));
        self.end(x)
    }

    fn loss_recomputed(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let x: Tensor<2> = input([3, 29], rank, step, device);
        let again = |layer: &Linear, x: Tensor<2>| x.clone() + gelu(layer.forward(x));
        let layers = self.layers.iter();
        let x = layers.fold(x, |x, layer| recompute(layer, x, again));
        self.end(x)
    }

    fn end(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.narrow.forward(self.norm.forward(x));
        self.head.forward(gelu(x)).powf_scalar(2.0).mean()
    }
}

const NET: Case<Net> = Case {
    build: Net::new,
    loss: Net::loss,
};

/// The adapted matrices.
const ADAPTED: [&str; 3] = ["layers.0.weight", "layers.1.weight", "narrow.weight"];

pub(super) fn adapters() -> Lora {
    Lora::new(2, 3.0).set_param_group(ParamGroup::from_paths(ADAPTED.to_vec()))
}

pub(super) fn policy(bits: BaseBits) -> ShardPolicy {
    let policy = ShardPolicy::new().units(["layers.*"]);
    policy.lora(adapters()).base_in(bits)
}

/// The elements of a matrix in these bits.
pub(super) fn rounded(bits: BaseBits, values: &[f32]) -> Vec<f32> {
    let bits = match bits {
        BaseBits::Eight => 8,
        BaseBits::Four => 4,
    };
    rounding::rounded(bits, values)
}

/// A mapper that keeps track of paths, and changes the values of some parameters in 32 bits.
struct Change<F> {
    path: Vec<String>,
    change: F,
}

impl<F: Fn(&str, Vec<f32>) -> Option<Vec<f32>>> ModuleMapper for Change<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let data = param.val().into_data().convert::<f32>();
        let values = data.try_to_vec::<f32>().expect("floats");
        let Some(values) = (self.change)(&path, values) else {
            return param;
        };
        param.map(|old| {
            let data = TensorData::new(values, old.shape());
            let new = Tensor::<D>::from_data(data, (&old.device(), DType::F32));
            let is_trained = old.is_require_grad();
            new.cast(old.dtype()).detach().set_require_grad(is_trained)
        })
    }
}

pub(super) fn changed<M: Module>(
    module: M,
    change: impl Fn(&str, Vec<f32>) -> Option<Vec<f32>>,
) -> M {
    let path = Vec::new();
    module.map(&mut Change { path, change })
}

/// The factors of every run, none of them zero.
pub(super) fn with_factors<M: Module>(module: M) -> M {
    changed(module, |path, values| {
        let number = path.len() + path.find("1").unwrap_or(0);
        let value = |i: usize| ((i * 5 + number * 3) % 11) as f32 / 20.0 - 0.23;
        let is_factor = path.contains(".lora.");
        is_factor.then(|| (0..values.len()).map(value).collect())
    })
}

/// Burn's module with adapters on a rounded base, on one rank.
fn plain(device: &Device, bits: BaseBits) -> Net {
    let model = seeded(Net::new(device), SEED);
    let model = changed(model, |path, values| {
        ADAPTED.contains(&path).then(|| rounded(bits, &values))
    });
    with_factors(model.apply_lora(adapters()))
}

pub(super) fn plainly(bits: BaseBits, ranks: usize, steps: usize) -> Outcome {
    let device = plain_device().autodiff();
    trained_plainly(plain(&device, bits), Net::loss, &device, [ranks, steps])
}

/// The module sharded by `policy`, with the factors of every run.
fn sharded(world: &ProcessGroup, policy: ShardPolicy) -> Result<Net, Error> {
    Ok(with_sharded_factors(build(NET, world, &device(), policy)?))
}

/// Writes whole factors, each rank its own part.
fn with_sharded_factors(model: Net) -> Net {
    let factors = params(&with_factors(
        seeded(Net::new(&plain_device().autodiff()), SEED).apply_lora(adapters()),
    ));
    let loaded = load_local_state(model, |tensor| {
        let found = factors.iter().find(|(path, _)| *path == tensor.path);
        let values = found.filter(|(path, _)| path.contains(".lora."));
        let part = values.map(|(_, values)| &values[tensor.range()]);
        let bytes = |part: &[f32]| part.iter().flat_map(|value| value.to_ne_bytes()).collect();
        Ok::<_, Error>(part.map(bytes))
    });
    loaded.expect("the same shapes")
}

pub(super) fn outcome(model: &Net, losses: Vec<f32>) -> Outcome {
    let plain = Net::new(&device()).apply_lora(adapters());
    // Also if copies with other values are alive.
    let record = into_record(model.clone()).expect("a record");
    let params = params(&plain.load_record(record));
    Outcome { losses, params }
}

type Loss = fn(&Net, usize, usize, &Device) -> Tensor<1>;

fn trained_on(world: &ProcessGroup, policy: ShardPolicy, loss: Loss) -> Result<Outcome, Error> {
    let mut model = sharded(world, policy)?;
    let mut optim = optimizer();
    let mut losses = Vec::new();
    for step in 0..4 {
        let loss = loss(&model, world.rank(), step, &device());
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = backward(loss, &model)?;
        model = optim.step(1e-2, model, gradients);
    }
    Ok(outcome(&model, losses))
}

fn trained(ranks: usize, policy: ShardPolicy, loss: Loss) -> Outcome {
    joined(&on_ranks(ranks, move |world| {
        trained_on(&world, policy.clone(), loss)
    }))
}

#[test]
fn training_matches_burn_on_a_rounded_base() {
    for bits in BOTH {
        for ranks in 1..=4 {
            let want = plainly(bits, ranks, 4);
            let tolerance = if ranks == 1 { 0.0 } else { 1e-5 };
            let policy = || policy(bits);
            for policy in [
                policy(),
                policy().units(Vec::<String>::new()),
                policy().reshard_root(true).prefetch(2),
                policy().strategy(Strategy::ShardGradOp),
                policy().strategy(Strategy::NoShard),
                policy().whole_below(100),
                policy().one_owner(["**"]),
                policy().cut(Cut::Multiples(128)),
                policy().in_files(std::env::temp_dir(), ["**"]),
                policy().offload_to(Device::flex()),
                policy().shard_vectors(true),
            ] {
                assert_close(&trained(ranks, policy, Net::loss), &want, tolerance);
            }
            let again = trained(ranks, policy(), Net::loss_recomputed);
            assert_close(&again, &want, 1e-5);
        }
        let near = policy(bits).reshard_after_forward_to(2);
        assert_close(&trained(4, near, Net::loss), &plainly(bits, 4, 4), 1e-5);
    }
}

/// The rounding is seen: the base differs, and so do losses.
#[test]
fn a_rounded_base_differs_from_an_exact_one() {
    let [eight, four] = BOTH.map(|bits| plainly(bits, 1, 1).losses[0]);
    let exact = trained(
        1,
        ShardPolicy::new().units(["layers.*"]).lora(adapters()),
        Net::loss,
    );
    let [eight, four] = [eight, four].map(|loss| (loss / exact.losses[0] - 1.0).abs());
    assert!(0.0 < eight && 5.0 * eight < four, "{eight}, {four}");
}

/// The levels are means of neighbouring quantiles of a normal distribution, scaled to 1 (equation 4). Those below zero
/// and those above are computed separately, so zero is a level.
#[test]
fn levels_are_quantiles_of_a_normal_distribution() {
    let density = |x: f64| (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let below = |x: f64| {
        let width = x / 2000.0;
        let sum = (0..2000).map(|i| {
            let at = |part: f64| density((i as f64 + part) * width);
            (at(0.0) + 4.0 * at(0.5) + at(1.0)) / 6.0
        });
        0.5 + sum.sum::<f64>() * width
    };
    let quantile = |part: f64| {
        let (mut low, mut high) = (-6.0, 6.0);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            if below(middle) < part {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    };
    // The outermost quantile is the mean of those of 1 - 1/30 and 1 - 1/32.
    let outermost = (1.0 - (1.0 / 30.0 + 1.0 / 32.0) / 2.0_f64, 0.5);
    let steps = |number: usize| {
        let part = move |i: usize| {
            let (from, to) = outermost;
            from + (to - from) * i as f64 / number as f64
        };
        (0..number).map(move |i| quantile(part(i)) / quantile(part(0)))
    };
    let negative = steps(7).map(|level| -level);
    let positive: Vec<f64> = steps(8).collect();
    let want = negative.chain([0.0]).chain(positive.into_iter().rev());
    for (level, want) in NF4.iter().zip(want) {
        assert!((f64::from(*level) - want).abs() < 1e-6, "{level}, {want}");
    }
}

/// The first forward has the same bits on any number of ranks, as with an exact base.
#[test]
fn values_do_not_depend_on_the_number_of_ranks() {
    for bits in BOTH {
        let first = |ranks: usize, policy: ShardPolicy| {
            let losses = on_ranks(ranks, move |world| {
                let model = sharded(&world, policy.clone())?;
                let loss = model.loss(0, 0, &device()).into_scalar::<f32>();
                reset(&model)?;
                Ok((loss.to_bits(), outcome(&model, Vec::new()).params))
            });
            for pair in losses.windows(2) {
                assert_eq!(pair[0], pair[1]);
            }
            losses[0].clone()
        };
        let (loss, params) = first(1, policy(bits));
        let want = super::bench::params(&plain(&plain_device().autodiff(), bits));
        assert_eq!(params, want);
        for ranks in 2..=4 {
            for policy in [policy(bits), policy(bits).strategy(Strategy::NoShard)] {
                let got = first(ranks, policy);
                assert_eq!(
                    (got.0, &got.1),
                    (loss, &params),
                    "{bits:?} on {ranks} ranks"
                );
            }
        }
    }
}

/// An element of 4 bits, and one 32-bit scale for 64: 28 percent of 16 bits.
#[test]
fn memory_and_traffic_have_the_bits_of_the_base() {
    for ranks in 1..=4 {
        let counted = |policy: ShardPolicy| {
            let all = on_ranks(ranks, move |world| {
                let mut model = build(NET, &world, &device(), policy.clone())?;
                let held = memory(&model)?.parameters;
                let mut optim = optimizer();
                let mut before = world.counts();
                // The first step agrees on its order.
                for step in 0..2 {
                    before = world.counts();
                    let gradients = backward(model.loss(world.rank(), step, &device()), &model)?;
                    model = optim.step(1e-2, model, gradients);
                }
                let counts = world.counts().since(&before);
                Ok((held, counts.of(OperationKind::AllGather).bytes as usize))
            });
            let held: usize = all.iter().map(|(held, _)| held).sum();
            (held, all[0].1)
        };
        let lora = || ShardPolicy::new().units(["layers.*"]).lora(adapters());
        let (held, sent) = counted(lora());
        let record = |bits: BaseBits, elements: usize| {
            let shard = elements.div_ceil(64).div_ceil(ranks) * 64;
            let shard = shard.min(elements);
            let codes = match bits {
                BaseBits::Eight => shard,
                BaseBits::Four => shard.div_ceil(2),
            };
            ranks * (codes.next_multiple_of(4) + 4 * shard.div_ceil(64))
        };
        for bits in BOTH {
            let (got, got_sent) = counted(lora().base_in(bits));
            let (layer, narrow) = (29 * 29, 29 * 2);
            let packed = 2 * record(bits, layer) + record(bits, narrow);
            assert_eq!(got, held - 4 * (2 * layer + narrow) + packed, "{bits:?}");
            if ranks > 1 {
                // The layers are gathered twice, except the last one, and the root once.
                let gathers = (sent - got_sent, got_sent);
                let most = 4 * (4 * layer + narrow);
                assert!(0 < gathers.0 && gathers.0 < most, "{gathers:?}");
                assert!(got_sent < sent / 2, "{bits:?}: {got_sent} of {sent}");
            }
        }
    }
}

/// The ratio of a matrix of usual size, by the report and by the bytes that ranks hold.
#[test]
fn four_bits_take_less_than_a_third_of_sixteen() {
    for ranks in 1..=4 {
        let held = |bits: Option<BaseBits>| {
            let all = on_ranks(ranks, move |world| {
                let matrix: Linear = LinearConfig::new(128, 192).with_bias(false).init(&device());
                let lora = ShardPolicy::new().lora(Lora::new(1, 1.0));
                let policy = bits.map_or(lora.clone(), |bits| lora.base_in(bits));
                let model = fully_shard(matrix, &world, policy)?;
                Ok(memory(&model)?.parameters)
            });
            all.into_iter().sum::<usize>()
        };
        let elements = 128 * 192;
        let factors = held(None) - 4 * elements;
        let four = held(Some(BaseBits::Four)) - factors;
        let eight = held(Some(BaseBits::Eight)) - factors;
        assert_eq!(four, elements / 2 + elements / 16);
        assert_eq!(eight, elements + elements / 16);
        assert!(100 * four <= 32 * 2 * elements, "{four}");
    }
}

/// Factors are stepped in backward, also if their unit has a frozen base in fewer bits.
#[test]
fn factors_step_in_backward() {
    for ranks in 1..=3 {
        let run = |way: Way| {
            joined(&on_ranks(ranks, move |world| {
                let model = sharded(&world, policy(BaseBits::Four))?;
                let plain = Net::new(&device()).apply_lora(adapters());
                train_by(way, model, optimizer(), 4, plain, |model, step| {
                    model.loss(world.rank(), step, &device())
                })
            }))
        };
        let [got, want] = [Way::InBackward, Way::AfterBackward].map(run);
        assert_same(&got, &want, "factors");
    }
}

#[test]
fn replicas_share_the_base() {
    let want = plainly(BaseBits::Four, 4, 4);
    let got = on_ranks(4, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::new([("replicate", 2), ("shard", 2)])?)?;
        let model = seeded(Net::new(&device()), SEED + world.rank() as u64);
        let policy = policy(BaseBits::Four).replicate_axis("replicate");
        let mut model = with_sharded_factors(fully_shard(model, &mesh, policy)?);
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..4 {
            let loss = model.loss(world.rank(), step, &device());
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok(outcome(&model, losses))
    });
    assert_close(&joined(&got), &want, 1e-5);
}

/// All ranks get the same values if each reads its own, and magnitudes are the norms of the rounded columns.
#[test]
fn a_base_is_read_in_parts_and_norms_are_of_its_rounded_columns() {
    for ranks in 1..=4 {
        on_ranks(ranks, |world| {
            let values = params(&seeded(Net::new(&plain_device().autodiff()), SEED));
            let policy = ShardPolicy::new().units(["layers.*"]).dora(adapters());
            let policy = policy.base_in(BaseBits::Four);
            let read = fully_shard_from(
                Net::new(&device()),
                &world,
                policy.clone(),
                |part| -> Result<_, Error> {
                    let found = values.iter().find(|(path, _)| path == part.path);
                    let part = found.map(|(_, values)| &values[part.range.clone()]);
                    let bytes =
                        |part: &[f32]| part.iter().copied().flat_map(f32::to_ne_bytes).collect();
                    Ok(part.map(bytes))
                },
            )?;
            let own = build(NET, &world, &device(), policy)?;
            for model in [read, own] {
                let mut whole = Vec::new();
                burn_fsdp_shard::recorded_state(&model, |tensor| {
                    let data = tensor.data.convert::<f32>();
                    whole.push((tensor.path, data.try_to_vec::<f32>().expect("floats")));
                })?;
                for (path, values) in &values {
                    let Some((_, got)) = whole.iter().find(|(known, _)| known == path) else {
                        assert!(world.rank() > 0);
                        continue;
                    };
                    if !ADAPTED.contains(&path.as_str()) {
                        assert_eq!(got, values, "{path}");
                        continue;
                    }
                    let want = rounded(BaseBits::Four, values);
                    assert_eq!(*got, want, "{path}");
                    let magnitude = format!("{path}.lora.magnitude");
                    let (_, norms) = whole
                        .iter()
                        .find(|(known, _)| *known == magnitude)
                        .expect("norms");
                    let columns = norms.len();
                    for (column, norm) in norms.iter().enumerate() {
                        let squares = want.iter().skip(column).step_by(columns);
                        let squares: f64 = squares.map(|value| f64::from(*value).powi(2)).sum();
                        assert!(
                            (f64::from(*norm) - squares.sqrt()).abs() < 1e-5,
                            "{magnitude}"
                        );
                    }
                }
            }
            Ok(())
        });
    }
}

/// A record, a state and an average contain exact values; loaded again, on another number of ranks too, they are
/// the same.
#[test]
fn written_and_read_again_nothing_changes() {
    for bits in BOTH {
        let want = params(&plain(&plain_device().autodiff(), bits));
        let on = move |ranks: usize, from: Option<Vec<u8>>| {
            let want = want.clone();
            let all = on_ranks(ranks, move |world| {
                let mut model = sharded(&world, policy(bits))?;
                if let Some(bytes) = &from {
                    let bytes = burn::tensor::Bytes::from_bytes_vec(bytes.clone());
                    let record = burn::store::ModuleRecord::from_bytes(bytes).expect("a record");
                    let zeros = changed(Net::new(&device()), |_, values| {
                        Some(vec![0.0; values.len()])
                    });
                    model = fully_shard(zeros, &world, policy(bits))?.load_record(record);
                }
                assert!(outcome(&model, Vec::new()).params == want, "loaded");
                let average = moving_average(model.clone(), &model, 0.3)?;
                for (got, want) in outcome(&average, Vec::new()).params.iter().zip(&want) {
                    assert!(
                        !ADAPTED.contains(&want.0.as_str()) || got == want,
                        "{}",
                        want.0
                    );
                }
                drop(average);
                let state: Vec<_> = local_state(&model)?;
                let mut state = state.into_iter();
                let again = load_local_state(model, |_| {
                    let tensor = state.next().expect("as many");
                    Ok::<_, Error>(Some(tensor.elements.as_bytes().to_vec()))
                })?;
                assert!(outcome(&again, Vec::new()).params == want, "read again");
                let valid = again.valid();
                assert!(outcome(&valid, Vec::new()).params == want, "valid");
                let record = into_record(valid.train())?;
                Ok(record.into_bytes().expect("bytes").to_vec())
            });
            all.into_iter().next().expect("a rank")
        };
        let record = on(1, None);
        for ranks in 2..=4 {
            on(ranks, Some(record.clone()));
            assert_eq!(on(ranks, None).len(), record.len());
        }
    }
}

/// Merged like Burn's module with the rounded base.
#[test]
fn adapters_are_merged_into_the_rounded_base() {
    for bits in BOTH {
        let adapted = plain(&plain_device().autodiff(), bits);
        let want = params(&adapted.materialize());
        for ranks in 1..=3 {
            for (merged, summoned) in on_ranks(ranks, move |world| {
                let model = sharded(&world, policy(bits))?;
                let mut summoned = None;
                let model = summon_full_params(model, WriteBack::Discard, |full| {
                    summoned = Some(params(&full));
                    full
                })?;
                Ok((params(&model.materialize()), summoned.expect("summoned")))
            }) {
                assert_eq!(merged, want);
                assert_eq!(summoned, want);
            }
        }
    }
}

/// A visitor that collects the elements of the weights as it sees them.
#[derive(Default)]
struct Seen {
    path: Vec<String>,
    found: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Seen {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        if D == 1 && ADAPTED.contains(&path.as_str()) {
            let data = param.val().into_data();
            assert_eq!(param.lazy_shape().num_elements(), data.num_elements());
            self.found
                .push((path, data.try_to_vec::<f32>().expect("floats")));
        }
    }
}

/// A program's walks see the rounded values, and what a mapper writes is rounded.
#[test]
fn visitors_and_mappers_see_elements() {
    for bits in BOTH {
        let values = params(&plain(&plain_device().autodiff(), bits));
        let joined: Vec<Vec<(String, Vec<f32>)>> = on_ranks(2, move |world| {
            let model = sharded(&world, policy(bits))?;
            let mut seen = Seen::default();
            model.visit(&mut seen);
            let doubled = changed(model, |path, values| {
                let is_base = ADAPTED.contains(&path) && values.len() % 29 != 1;
                is_base.then(|| values.iter().map(|value| 2.0 * value).collect())
            });
            let got = outcome(&doubled, Vec::new()).params;
            for (path, values) in &values {
                let (_, got) = got
                    .iter()
                    .find(|(known, _)| known == path)
                    .expect("a value");
                let factor = if ADAPTED.contains(&path.as_str()) {
                    2.0
                } else {
                    1.0
                };
                let want: Vec<_> = values.iter().map(|value| factor * value).collect();
                assert_eq!(*got, want, "{path}");
            }
            Ok(seen.found)
        });
        let values = params(&plain(&plain_device().autodiff(), bits));
        for path in ADAPTED {
            let parts = joined.iter().map(|seen| {
                let (_, part) = seen.iter().find(|(known, _)| known == path).expect("seen");
                part.clone()
            });
            let (_, want) = values
                .iter()
                .find(|(known, _)| known == path)
                .expect("a value");
            assert_eq!(parts.collect::<Vec<_>>().concat(), *want);
        }
    }
}

/// Stored in 16 bits, the unpacked values are rounded to them; computing in 16 bits, they are cast after that.
#[test]
fn bases_of_sixteen_bits_keep_their_type() {
    let half = |values: Vec<f32>| -> Vec<f32> {
        let values = values.into_iter();
        values
            .map(|value| half::bf16::from_f32(value).to_f32())
            .collect()
    };
    for bits in BOTH {
        for ranks in 1..=3 {
            on_ranks(ranks, move |world| {
                let exact = params(&seeded(Net::new(&plain_device().autodiff()), SEED));
                let values = |path: &str| {
                    let found = exact.iter().find(|(known, _)| known == path);
                    found.expect("a value").1.clone()
                };
                let stored = changed_type(seeded(Net::new(&device()), SEED), DType::BF16);
                let narrow = fully_shard(stored, &world, policy(bits))?;
                let computed = policy(bits).precision(Precision::new(FloatDType::BF16));
                let computed = build(NET, &world, &device(), computed)?;
                for (path, narrow, computed) in [
                    ("layers.1.weight", &narrow.layers[1], &computed.layers[1]),
                    ("narrow.weight", &narrow.narrow, &computed.narrow),
                ] {
                    let got = |layer: &Linear| {
                        let value = layer.weight.val();
                        assert_eq!(value.dtype(), DType::BF16);
                        let data = value.into_data().convert::<f32>();
                        data.try_to_vec::<f32>().expect("floats")
                    };
                    let want = half(rounded(bits, &half(values(path))));
                    assert_eq!(got(narrow), want, "{path}");
                    assert_eq!(got(computed), half(rounded(bits, &values(path))), "{path}");
                }
                reset(&narrow)?;
                reset(&computed)?;
                let whole = summon_full_params(narrow, WriteBack::Discard, |full| {
                    assert_eq!(full.layers[0].weight.val().dtype(), DType::BF16);
                    full
                })?;
                drop(whole);
                Ok(())
            });
        }
    }
}

fn changed_type<M: Module>(module: M, dtype: DType) -> M {
    struct Cast(DType);
    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|old| {
                let is_trained = old.is_require_grad();
                old.cast(self.0).detach().set_require_grad(is_trained)
            })
        }
    }
    module.map(&mut Cast(dtype))
}

/// Blocks of zeros stay zero, and all other parameters keep their bits.
#[test]
fn zeros_and_other_parameters_are_exact() {
    for bits in BOTH {
        on_ranks(3, move |world| {
            let zeroed = || {
                changed(seeded(Net::new(&device()), SEED), |path, mut values| {
                    let is_first = path == "layers.0.weight";
                    is_first.then(|| {
                        values[64..192].fill(0.0);
                        values
                    })
                })
            };
            let want = params(&zeroed());
            let model = fully_shard(zeroed(), &world, policy(bits))?;
            for (path, got) in outcome(&model, Vec::new()).params {
                let Some((_, want)) = want.iter().find(|(known, _)| *known == path) else {
                    continue;
                };
                if ADAPTED.contains(&path.as_str()) {
                    assert_eq!(got, rounded(bits, want), "{path}");
                } else {
                    assert_eq!(got, *want, "{path}");
                }
                assert!(path != "layers.0.weight" || got[64..192].iter().all(|x| x.to_bits() == 0));
            }
            Ok(())
        });
    }
}

#[test]
fn what_a_base_in_fewer_bits_cannot_do_is_rejected() {
    let with_bad = |value: f32| {
        changed(
            seeded(Net::new(&device()), SEED),
            move |path, mut values| {
                let is_it = path == "layers.1.weight";
                is_it.then(|| {
                    values[700] = value;
                    values
                })
            },
        )
    };
    on_ranks(3, move |world| {
        let refused = |model: Net, policy: ShardPolicy| {
            let refused = fully_shard(model, &world, policy);
            refused.expect_err("refused").to_string()
        };
        let net = || seeded(Net::new(&device()), SEED);
        let bits = BaseBits::Four;
        let message = refused(net(), ShardPolicy::new().base_in(bits));
        assert!(
            message.contains("base_in is set without adapters"),
            "{message}"
        );
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let message = refused(with_bad(bad), policy(bits));
            let named = "`layers.1.weight`, whose element 700 is infinite or NaN (on rank 2)";
            assert!(message.contains(named), "{message}");
        }
        let message = refused(net(), policy(bits).cut(Cut::Dims));
        let named = "`narrow.weight`, which is cut at element 20";
        assert!(
            message.contains(named) && message.contains("Cut::Multiples(64)"),
            "{message}"
        );
        let message = refused(net(), policy(bits).cut(Cut::Multiples(100)));
        assert!(message.contains("cut at element 300"), "{message}");
        let message = refused(changed_type(net(), DType::F64), policy(bits));
        assert!(message.contains("`narrow.weight` in F64"), "{message}");

        let model = fully_shard(net(), &world, policy(bits))?;
        let error = catch(|| model.clone().unfreeze())
            .map(drop)
            .expect_err("frozen");
        assert!(error.to_string().contains("made trainable"), "{error}");
        let error = catch(|| model.valid().unfreeze())
            .map(drop)
            .expect_err("frozen");
        assert!(error.to_string().contains("made trainable"), "{error}");
        let error = catch(|| changed_type(model.clone(), DType::BF16));
        let error = error.map(drop).expect_err("its own type");
        assert!(
            error.to_string().contains("cast to another type"),
            "{error}"
        );
        let record = with_bad(f32::NAN).apply_lora(adapters()).into_record();
        let loaded = catch(|| model.load_record(record)).map(drop);
        if world.rank() == 2 {
            let error = loaded.expect_err("not finite").to_string();
            assert!(error.contains("element 700 is infinite or NaN"), "{error}");
        }
        Ok(())
    });
}
