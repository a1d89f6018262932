//! Collectives in the memory of a device that threads share.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fsdp_collectives::engine::{
    Awaited, Claim, Completion, Control, Engine, Findings, Flight, Meeting, Messages, Payload,
    Request, Stopped, Subgroup,
};
use burn_fsdp_collectives::{
    Buffer, Check, ElementType, FullPart, LaunchConfig, Operation, ProcessGroup, ProcessMesh,
    ReduceOp, Reduction, Source,
};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Clip, Cut, Error, ShardPolicy, Strategy, backward, clip_grad_norm, fully_shard, launch, memory,
    no_sync,
};
use burn_fsdp_tensors::{Medium, Staged, Staging, arrived, device_buffer, device_source};

use super::bench::{SEED, named_device, optimizer, plain_device, seeded};
use super::nets::Mlp;

/// The device of the tests: the one that `BURN_FSDP_TEST_DEVICE` names, or another backend on the CPU.
fn device() -> Option<Device> {
    let device = plain_device();
    if device != Device::flex() {
        return Some(device);
    }
    if cfg!(feature = "ndarray") {
        return Some(named_device("ndarray"));
    }
    super::skipped::skipped("this build has no device beside the CPU");
    None
}

/// An engine that moves the floats of host memory to a device, lets another engine exchange them there, and brings the
/// results back.
#[derive(Debug)]
struct Uploading {
    inner: Box<dyn Engine>,
    device: Device,
}

struct Uploaded {
    inner: Box<dyn Flight>,
    /// The host buffers of the request, if it was moved.
    into: Option<Vec<Buffer>>,
}

impl Messages for Uploading {
    fn control(&self) -> &Arc<Control> {
        self.inner.control()
    }

    fn post(&self, operation: &Operation, claim: Claim) -> Arc<dyn Meeting> {
        self.inner.post(operation, claim)
    }
}

fn uploaded(source: &Source, device: &Device, dtype: DType) -> Source {
    let len = source.len() / dtype.size();
    let data = TensorData::from_bytes_vec(source.as_bytes().to_vec(), [len], dtype);
    let tensor = Tensor::<1>::from_data(data, (device, dtype));
    device_source::<Dispatch>(tensor.into_dispatch(), len, None)
}

impl Engine for Uploading {
    fn name(&self) -> &'static str {
        "uploading"
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        let signature = &request.claim.signature;
        let (extents, device) = (&signature.extents, &self.device);
        let kept = |element: ElementType| {
            let known = match element {
                ElementType::F16 => DType::F16,
                ElementType::BF16 => DType::BF16,
                ElementType::F32 => DType::F32,
                ElementType::F64 => DType::F64,
                _ => return None,
            };
            device.supports_dtype(known).then_some(known)
        };
        let dtypes = extents.iter().map(|extent| {
            let output = signature.reduction.map(|r| r.output_of(extent.element));
            kept(output.unwrap_or(extent.element))?;
            kept(extent.element)
        });
        let dtypes: Option<Vec<_>> = dtypes.collect();
        let Some(dtypes) = dtypes else {
            let inner = self.inner.start(request);
            return Box::new(Uploaded { inner, into: None });
        };
        let sources = request.sources.iter().zip(&dtypes);
        let sources = sources.map(|(source, dtype)| uploaded(source, device, *dtype));
        let into = request.into.iter();
        let into = into.map(|buffer| device_buffer::<Dispatch>(device.as_dispatch(), buffer.len()));
        let inner = self.inner.start(Request {
            operation: request.operation,
            sources: sources.collect(),
            into: into.collect(),
            claim: request.claim,
        });
        Box::new(Uploaded {
            inner,
            into: Some(request.into),
        })
    }

    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine> {
        Box::new(Self {
            inner: self.inner.split(subgroup),
            device: self.device.clone(),
        })
    }
}

impl Flight for Uploaded {
    fn meeting(&self) -> &dyn Meeting {
        self.inner.meeting()
    }

    fn is_there(&self, awaited: Awaited) -> bool {
        self.inner.is_there(awaited)
    }

    fn missing(&self, awaited: Awaited) -> Vec<usize> {
        self.inner.missing(awaited)
    }

    fn begin(&mut self) -> Result<(), Stopped> {
        self.inner.begin()
    }

    fn receive(&mut self) -> Result<Completion, Stopped> {
        let completion = self.inner.receive()?;
        let (Some(mut into), Completion::Done(results)) = (self.into.take(), &completion) else {
            return Ok(completion);
        };
        for (buffer, result) in into.iter_mut().zip(results) {
            assert!(
                result.is_empty() || result.host().is_none(),
                "on the device"
            );
            let bytes = Payload::read(result).map_err(Stopped::Failed)?;
            buffer.as_mut().copy_from_slice(&bytes);
        }
        Ok(Completion::Done(into))
    }

    /// Not the inner engine's, which has read other bytes.
    fn findings(&mut self) -> Findings {
        Findings::default()
    }
}

#[test]
fn threads_meet_the_contract_of_engines_in_device_memory() {
    let Some(device) = device() else { return };
    for (name, case) in burn_fsdp_engine_tests::CASES {
        for (ranks, check) in (1..=4).flat_map(|n| [(n, Check::Calls), (n, Check::Agreement)]) {
            let device = device.clone();
            let body = move |world: ProcessGroup| {
                case(&world.on_engine("uploading", |inner, _| {
                    let device = device.clone();
                    Box::new(Uploading { inner, device })
                })?)
            };
            let result = launch(LaunchConfig::new(ranks).check(check), body);
            assert!(
                result.is_ok(),
                "{name}, {ranks} ranks, {check:?}: {result:?}"
            );
        }
    }
}

/// Returns values whose sum depends on the order of additions. Some are zeros of both signs, infinite, or not a number.
fn values(rank: usize, len: usize) -> Vec<f32> {
    let value = |i: usize| match (i + rank) % 101 {
        7 => f32::INFINITY,
        8 => f32::NEG_INFINITY,
        9 => f32::NAN,
        10 => 0.0,
        11 => -0.0,
        _ => ((i * 7919 + rank * 104_729) % 1009) as f32 * 1.7e-3 - 0.4,
    };
    (0..len).map(value).collect()
}

/// All-reduces the ranks' values, in the memory of `device` if there is one.
fn reduced(
    device: Option<&Device>,
    reduction: Reduction,
    (ranks, len): (usize, usize),
) -> Vec<Vec<u32>> {
    let device = device.cloned();
    let body = move |world: ProcessGroup| {
        let own = values(world.rank(), len);
        let medium = match &device {
            Some(device) => Medium::of(&world, [device.clone()]),
            None => Medium::Host,
        };
        let home = device.clone().unwrap_or_else(Device::flex);
        let staging = Staging::default();
        let tensor = Tensor::<1>::from_floats(own.as_slice(), &home);
        let source = medium.source(&staging, tensor, None);
        let part = FullPart::new(source, ElementType::F32);
        let into = medium.buffer(world.pool(), 4 * own.len());
        let mut sums = world.all_reduce("sums", vec![], reduction, vec![part], vec![into])?;
        assert_eq!(staging.staged(), Default::default(), "nothing is copied");
        let sum = match arrived(sums.buffers.remove(0), DType::F32) {
            Ok(tensor) => tensor,
            Err(buffer) => burn_fsdp_tensors::tensor(buffer, DType::F32, &home),
        };
        // All that is not a number is the same.
        let bits = |sum: f32| {
            if sum.is_nan() {
                u32::MAX
            } else {
                sum.to_bits()
            }
        };
        let sum = sum.into_data();
        Ok::<_, burn_fsdp_collectives::Error>(sum.iter().map(bits).collect())
    };
    launch(LaunchConfig::new(ranks), body).unwrap()
}

/// Sums in the order of the ranks, scaled before and after, have the same bits in any memory.
#[test]
fn reductions_on_a_device_have_the_bits_of_the_host() {
    let Some(device) = device() else { return };
    // With 2 elements, some of 4 ranks combine none.
    for (ranks, len) in [(1, 1003), (2, 1003), (3, 1003), (4, 1003), (4, 2)] {
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
            for (pre_scale, post_scale) in [(1.0, 1.0), (0.5, 3.0)] {
                let reduction = Reduction {
                    op,
                    pre_scale,
                    post_scale,
                    ..Reduction::sum()
                };
                let host = reduced(None, reduction, (ranks, len));
                let there = reduced(Some(&device), reduction, (ranks, len));
                assert_eq!(host, there, "{op:?} on {ranks} ranks");
            }
        }
    }
}

/// A rank may receive on the host what others give on a device, and the other way round.
#[test]
fn ranks_may_have_their_tensors_in_different_memory() {
    let Some(device) = device() else { return };
    let body = move |world: ProcessGroup| {
        let home = match world.rank() {
            1 => Device::flex(),
            _ => device.clone(),
        };
        let medium = Medium::of(&world, [home.clone()]);
        let tensor = Tensor::<1>::from_floats([world.rank() as f32, 0.5], &home);
        let part = FullPart::new(
            medium.source(&Staging::default(), tensor, None),
            ElementType::F32,
        );
        let into = medium.buffer(world.pool(), 8);
        let mut sums =
            world.all_reduce("sums", vec![], Reduction::sum(), vec![part], vec![into])?;
        let sum = match arrived(sums.buffers.remove(0), DType::F32) {
            Ok(tensor) => tensor,
            Err(buffer) => burn_fsdp_tensors::tensor(buffer, DType::F32, &home),
        };
        assert_eq!(sum.device(), home);
        Ok::<_, burn_fsdp_collectives::Error>(sum.into_data().iter::<f32>().collect::<Vec<_>>())
    };
    for sum in launch(LaunchConfig::new(3), body).unwrap() {
        assert_eq!(sum, [3.0, 1.5]);
    }
}

/// Ranks that compare bytes read them on the host.
#[test]
fn ranks_that_compare_bytes_use_the_host() {
    let Some(device) = device() else { return };
    let body = move |world: ProcessGroup| {
        let medium = Medium::of(&world, [device.clone()]);
        assert!(matches!(medium, Medium::Host));
        let tensor = Tensor::<1>::from_floats([1.0], &device);
        let part = FullPart::new(
            device_source::<Dispatch>(tensor.into_dispatch(), 1, None),
            ElementType::F32,
        );
        let into = vec![world.pool().take(4)];
        let refused = world.all_reduce("sum", vec![], Reduction::sum(), vec![part], into);
        Ok::<_, burn_fsdp_collectives::Error>(refused.unwrap_err().to_string())
    };
    let config = LaunchConfig::new(1).check(Check::Agreement);
    let refused = launch(config, body).unwrap().remove(0);
    assert!(refused.contains("because ranks compare bytes"), "{refused}");
}

/// Each rank reads what another has just written, over and over.
#[test]
fn ranks_read_complete_values() {
    let Some(device) = device() else { return };
    let body = move |world: ProcessGroup| {
        let medium = Medium::of(&world, [device.clone()]);
        let (rank, len) = (world.rank(), 4096);
        let mut held = Tensor::<1>::full([len], rank as f32, &device);
        for round in 0..40 {
            // Updates in place, where the backend can.
            held = held.add_scalar(1.0).mul_scalar(2.0).div_scalar(2.0);
            let source = medium.source(&Staging::default(), held.clone(), None);
            let part = FullPart::new(source, ElementType::F32);
            let into = vec![medium.buffer(world.pool(), 4 * len)];
            let sum = Reduction::sum();
            let mut sums = world.all_reduce("round", vec![], sum, vec![part], into)?;
            let sum = arrived(sums.buffers.remove(0), DType::F32).expect("on the device");
            let sum: Vec<f32> = sum.into_data().iter().collect();
            let want = 3.0 + 3.0 * (round + 1) as f32;
            assert!(sum.iter().all(|sum| *sum == want), "round {round}");
        }
        Ok::<_, burn_fsdp_collectives::Error>(())
    };
    launch(LaunchConfig::new(3), body).unwrap();
}

/// What a run has besides units and a strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Also {
    Nothing,
    Replicas,
    Frozen,
    Adapters,
    MicroBatches,
}

/// Trains for two steps, with clipping. Returns the losses of each rank, and the copies between the host and the device.
fn trained_on(
    device: &Device,
    ranks: usize,
    policy: &ShardPolicy,
    also: Also,
) -> Vec<(Vec<f32>, Staged)> {
    let (device, policy) = (device.clone().autodiff(), policy.clone());
    let body = move |world: ProcessGroup| {
        let mut model = seeded(Mlp::new(&device), SEED);
        let mut policy = policy.clone();
        let mut mesh = Mesh::line("shard", ranks)?;
        match also {
            Also::Replicas => {
                mesh = Mesh::new([("replicas", 2), ("shard", ranks / 2)])?;
                policy = policy.replicate_axis("replicas");
            }
            Also::Frozen => model.blocks[1] = model.blocks[1].clone().no_grad(),
            Also::Adapters => {
                policy = policy.lora(super::lora::adapters());
            }
            Also::Nothing | Also::MicroBatches => {}
        }
        let mesh = ProcessMesh::new(&world, mesh)?;
        let mut model = fully_shard(model, &mesh, policy)?;
        let (mut optim, mut losses) = (optimizer(), Vec::new());
        for step in 0..2 {
            if also == Also::MicroBatches {
                let run = || backward(model.loss(world.rank(), step + 7, &device), &model);
                drop(no_sync(&model, run)??);
            }
            let loss = model.loss(world.rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            let clipped = clip_grad_norm(&model, gradients, Clip::to(0.05))?;
            model = optim.step(1e-2, model, clipped.gradients);
        }
        Ok::<_, Error>((losses, memory(&model)?.staged))
    };
    launch(LaunchConfig::new(ranks), body).unwrap()
}

/// Steps of every kind copy nothing through the host, and train as on the CPU.
#[test]
fn steps_of_any_policy_stay_on_the_device() {
    let Some(device) = device() else { return };
    let blocks = || ShardPolicy::new().units(["blocks.*"]);
    let policies = [
        blocks(),
        blocks().strategy(Strategy::ShardGradOp),
        blocks().strategy(Strategy::NoShard),
        blocks().shard_vectors(true).whole_below(20),
        blocks().one_owner(["blocks.*.up.weight"]),
        blocks().cut(Cut::Dims),
    ];
    for (number, policy) in policies.iter().enumerate() {
        for (ranks, also) in [
            (1, Also::Nothing),
            (3, Also::Nothing),
            (4, Also::Replicas),
            (2, Also::Frozen),
            (2, Also::Adapters),
            (3, Also::MicroBatches),
        ] {
            let what = format!("policy {number}, {ranks} ranks, {also:?}");
            let there = trained_on(&device, ranks, policy, also);
            for (_, staged) in &there {
                assert_eq!(*staged, Staged::default(), "{what}");
            }
            if also == Also::Adapters {
                // Their factors start from random values.
                continue;
            }
            let here = trained_on(&Device::flex(), ranks, policy, also);
            for ((there, _), (here, _)) in there.iter().zip(&here) {
                for (there, here) in there.iter().zip(here) {
                    assert!(
                        (there - here).abs() <= 1e-4 * here.abs(),
                        "{what}: {there}, {here}"
                    );
                }
            }
        }
    }
}

/// Backward gathers among neighbours from pieces that stay on the device.
#[test]
fn pieces_of_forward_stay_on_the_device() {
    let Some(device) = device() else { return };
    let policy = ShardPolicy::new()
        .units(["blocks.*"])
        .reshard_after_forward_to(2);
    for (_, staged) in trained_on(&device, 4, &policy, Also::Nothing) {
        assert_eq!(staged, Staged::default());
    }
}

/// Devices round differently, but all ranks scale by the same factor.
#[test]
fn ranks_on_different_devices_clip_by_the_same_norm() {
    let Some(device) = device() else { return };
    for strategy in [Strategy::NoShard, Strategy::FullShard] {
        let device = device.clone();
        let body = move |world: ProcessGroup| {
            let home = match world.rank() {
                1 => Device::flex(),
                _ => device.clone(),
            };
            let home = home.autodiff();
            let policy = ShardPolicy::new().units(["blocks.*"]).strategy(strategy);
            let model = fully_shard(seeded(Mlp::new(&home), SEED), &world, policy)?;
            let gradients = backward(model.loss(world.rank(), 0, &home), &model)?;
            let clipped = clip_grad_norm(&model, gradients, Clip::to(0.05))?;
            Ok::<_, Error>((clipped.total_norm.to_bits(), clipped.coefficient.to_bits()))
        };
        let norms = launch(LaunchConfig::new(3), body).unwrap();
        assert!(norms.iter().all(|norm| *norm == norms[0]), "{norms:?}");
    }
}
