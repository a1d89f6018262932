//! Running states in another type than the module's, and back in their own type wherever they are saved.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_shard::{
    Error, Precision, ShardPolicy, WriteBack, backward, cast_buffers, full_state, fully_shard,
    into_record, load_local_state, local_state, recorded_state, summon_full_params,
};

use super::bench::{build, device, on_ranks, optimizer, seeded_by_rank, whole_params};
use super::nets::{CONV_NET, ConvNet, input};

fn policy() -> ShardPolicy {
    ShardPolicy::new()
        .units(["convs.*"])
        .precision(Precision::new(FloatDType::BF16))
}

fn loss(model: &ConvNet, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let x = input([2, 3, 5, 5], rank, step, device);
    let mut x = x.cast(model.convs[0].weight.val().dtype());
    for (conv, norm) in model.convs.iter().zip(&model.norms) {
        x = relu(norm.forward(conv.forward(x)));
    }
    let x: Tensor<2> = x.mean_dim(3).mean_dim(2).reshape([2, 7]);
    let x = model.head.forward(x).cast(DType::F32);
    x.powf_scalar(2.0).mean()
}

fn trained(mut model: ConvNet, rank: usize, steps: usize) -> Result<ConvNet, Error> {
    let mut optim = optimizer();
    for step in 0..steps {
        let gradients = backward(loss(&model, rank, step, &device()), &model)?;
        model = optim.step(1e-2, model, gradients);
    }
    Ok(model)
}

/// The type and the values of each running state, by path.
type States = BTreeMap<String, (DType, Vec<f32>)>;

fn is_state(path: &str) -> bool {
    path.contains(".running_")
}

/// The running states that a visitor of the module sees.
fn seen<M: Module>(module: &M) -> States {
    #[derive(Default)]
    struct Seen(Vec<String>, States);
    impl ModuleVisitor for Seen {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let path = self.0.join(".");
            if is_state(&path) {
                let data = param.val().into_data();
                let dtype = data.dtype();
                let values = data.convert::<f32>().try_to_vec().expect("f32");
                self.1.insert(path, (dtype, values));
            }
        }
    }
    let mut seen = Seen::default();
    module.visit(&mut seen);
    seen.1
}

/// The same states in another type.
fn of_type(states: &States, dtype: DType) -> States {
    let states = states.iter();
    let states = states.map(|(path, (_, values))| (path.clone(), (dtype, values.clone())));
    states.collect()
}

fn from_bytes(dtype: DType, bytes: &[u8]) -> (DType, Vec<f32>) {
    assert_eq!(dtype, DType::F32);
    let values = bytes.chunks_exact(4);
    let values = values.map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    (dtype, values.collect())
}

#[test]
fn training_is_that_of_states_cast_before() {
    for ranks in [1, 3] {
        on_ranks(ranks, move |world| {
            let case = CONV_NET;
            let by_policy = policy().buffer_type(FloatDType::BF16);
            let model = build(case, &world, &device(), by_policy)?;
            let got = trained(model, world.rank(), 4)?;
            let before = seeded_by_rank(ConvNet::new(&device()), world.rank());
            let before = cast_buffers(before, FloatDType::BF16)?;
            let model = fully_shard(before, &world, policy())?;
            let want = trained(model, world.rank(), 4)?;
            let whole = |model| whole_params(ConvNet::new(&device()), model);
            assert_eq!(whole(&got), whole(&want));
            drop(got.valid());
            assert!(seen(&got).values().all(|(dtype, _)| *dtype == DType::BF16));
            Ok(())
        });
    }
}

/// Everything that leaves the sharded module has the states in 32 bits.
#[test]
fn states_leave_the_module_in_their_original_type() {
    for (ranks, is_nested) in [(1, false), (2, false), (2, true)] {
        on_ranks(ranks, move |world| {
            let by_policy = policy().buffer_type(FloatDType::BF16);
            let mut model = seeded_by_rank(ConvNet::new(&device()), world.rank());
            if is_nested {
                // The child's own call casts its states, and the parent's finds them cast.
                let norms = ShardPolicy::new().precision(Precision::new(FloatDType::BF16));
                let norms = norms.buffer_type(FloatDType::BF16);
                model.norms[1] = fully_shard(model.norms[1].clone(), &world, norms)?;
            }
            let model = fully_shard(model, &world, by_policy)?;
            let model = trained(model, world.rank(), 3)?;
            drop(model.valid());
            let inside = seen(&model);
            assert_eq!(inside.len(), 6);
            assert_eq!(inside, of_type(&inside, DType::BF16));
            let want = of_type(&inside, DType::F32);

            let mut local = States::new();
            for tensor in local_state(&model)?.iter().filter(|it| is_state(&it.path)) {
                let read = from_bytes(tensor.dtype, tensor.elements.as_bytes());
                local.insert(tensor.path.clone(), read);
            }
            assert_eq!(local, want);
            let mut full = States::new();
            full_state(&model, |tensor| {
                if is_state(tensor.path) {
                    let read = from_bytes(tensor.dtype, tensor.bytes);
                    full.insert(tensor.path.to_owned(), read);
                }
            })?;
            let mut recorded = States::new();
            recorded_state(&model, |tensor| {
                if is_state(&tensor.path) {
                    let read = from_bytes(tensor.data.dtype(), tensor.data.as_bytes());
                    recorded.insert(tensor.path, read);
                }
            })?;
            if world.rank() == 0 {
                assert_eq!(full, want);
                assert_eq!(recorded, want);
            }
            let record = into_record(model.clone())?;
            assert_eq!(seen(&ConvNet::new(&device()).load_record(record)), want);
            assert_eq!(seen(&model), inside, "the module itself is unchanged");
            let model = summon_full_params(model, WriteBack::Keep, |full| {
                assert_eq!(seen(&full), want);
                full
            })?;
            assert_eq!(seen(&model), inside);

            // They return in the type that the policy set.
            let model = load_local_state(model, |tensor| {
                Ok::<_, Error>(Some(if is_state(&tensor.path) {
                    [1.5f32, -2.0, 0.25, 3.0, 7.0, 1.0, 2.0]
                        .iter()
                        .take(tensor.shape[0])
                        .flat_map(|value| value.to_ne_bytes())
                        .collect()
                } else {
                    tensor.elements.as_bytes().to_vec()
                }))
            })?;
            for (dtype, values) in seen(&model).into_values() {
                assert_eq!(dtype, DType::BF16);
                assert_eq!(values[..5], [1.5, -2.0, 0.25, 3.0, 7.0]);
            }
            trained(model, world.rank(), 1)?;
            Ok(())
        });
    }
}

/// A wider type is kept: casting back would round the averages.
#[test]
fn states_cast_to_a_wider_type_stay_in_it() {
    on_ranks(2, |world| {
        let narrow = seeded_by_rank(ConvNet::new(&device()), world.rank());
        let narrow = cast_buffers(narrow, FloatDType::BF16)?;
        let policy = ShardPolicy::new().units(["convs.*"]);
        let model = fully_shard(narrow, &world, policy.buffer_type(FloatDType::F32))?;
        let model = trained(model, world.rank(), 2)?;
        drop(model.valid());
        let before = seen(&model);
        assert!(before.values().all(|(dtype, _)| *dtype == DType::F32));
        into_record(model.clone())?;
        assert_eq!(seen(&model), before);
        let model = summon_full_params(model, WriteBack::Keep, |full| full)?;
        assert_eq!(seen(&model), before);
        Ok(())
    });
}

/// Burn takes the types of a record unless it is told otherwise.
#[test]
fn records_load_in_the_modules_types() {
    on_ranks(2, |world| {
        let model = seeded_by_rank(ConvNet::new(&device()), world.rank());
        let model = fully_shard(model, &world, policy().buffer_type(FloatDType::BF16))?;
        let model = trained(model, world.rank(), 2)?;
        let record = into_record(model.clone())?.cast_to_module_dtype();
        let model = model.load_record(record);
        assert!(
            seen(&model)
                .values()
                .all(|(dtype, _)| *dtype == DType::BF16)
        );
        trained(model, world.rank(), 1)?;
        Ok(())
    });
}
