//! Steps saved at any world size and layout are loaded at any other.

mod common;

use std::path::Path;
use std::sync::Arc;

use burn_fsdp_checkpoint::storage::Memory;
use burn_fsdp_checkpoint::{
    Checkpoints, Dtype, Layout, Limits, Mesh, Placement, ReadPlan, Region, Step, TensorKind,
    TensorSpec, Verification, WritePlan,
};
use common::faulty::{Fail, Faulty};
use common::{KINDS, Kind};
use proptest::prelude::*;

fn checkpoints(memory: &Memory) -> Checkpoints {
    Checkpoints::with_storage(Arc::new(memory.clone()), "run")
}

/// Asserts that every rank of the mesh reads exactly the elements that it holds, from no more bytes than necessary.
fn assert_loads(memory: &Memory, step: u64, mesh: &Mesh, kind: Kind) {
    let dir = checkpoints(memory).path(step);
    for rank in 0..mesh.size() {
        let wanted: Vec<(TensorSpec, Region)> = common::tensors(mesh, kind)
            .into_iter()
            .map(|tensor| {
                let region = tensor.layout.region(&tensor.shape, mesh, rank);
                (tensor, region.expect("fits"))
            })
            .collect();
        for verification in [Verification::Chunks, Verification::None] {
            let counting = Arc::new(Faulty::new(memory.clone(), Fail::Never));
            let open = Step::open_in(counting.clone(), &dir, Limits::default());
            let open = open.expect("opens").verification(verification);
            let pairs = wanted.iter().map(|(t, region)| (t.name.as_str(), region));
            let planned = ReadPlan::new(open.index(), pairs).expect("all there");
            let needed: usize = wanted
                .iter()
                .map(|(tensor, region)| region.len() * tensor.dtype.bitsize() / 8)
                .sum();
            assert_eq!(planned.num_bytes(), needed as u64, "the plan is exact");
            let before = counting.bytes_read();
            for (tensor, region) in &wanted {
                let got = open.read(&tensor.name, region).expect("reads");
                let name = &tensor.name;
                assert_eq!(
                    got,
                    common::part_of(tensor, region),
                    "{name} on {rank} of {mesh}"
                );
            }
            let headers: std::collections::BTreeSet<_> =
                planned.reads.iter().map(|read| read.file).collect();
            // Empty regions open no file.
            let headers = headers
                .into_iter()
                .map(|f| open.index().files[f].header_bytes);
            let read = counting.bytes_read() - before - headers.sum::<u64>();
            match verification {
                Verification::None => assert_eq!(read, needed as u64, "reads what it needs"),
                Verification::Chunks => assert!(read >= needed as u64),
            }
        }
    }
}

#[test]
fn saved_at_n_loads_at_m() {
    for saved_kind in KINDS {
        for n in 1..=8 {
            let memory = Memory::new();
            let mesh = common::line(n);
            common::save_step(&checkpoints(&memory), &common::plan(&mesh, saved_kind), 3);
            for m in 1..=8 {
                for kind in KINDS {
                    assert_loads(&memory, 3, &common::line(m), kind);
                }
            }
        }
    }
}

#[test]
fn hybrid_meshes_store_each_element_once_and_balance() {
    for (replicas, shards) in [(2, 4), (4, 2), (2, 3)] {
        let mesh = Mesh::new([("replicate", replicas), ("shard", shards)]).expect("a mesh");
        for kind in KINDS {
            let memory = Memory::new();
            let plan = common::plan(&mesh, kind);
            let total: usize = plan.tensors().iter().map(common::num_bytes).sum();
            let loads: Vec<_> = (0..mesh.size())
                .map(|rank| plan.bytes_of_rank(rank))
                .collect();
            assert_eq!(loads.iter().sum::<u64>(), total as u64, "written once");
            let largest = plan
                .tensors()
                .iter()
                .map(common::num_bytes)
                .max()
                .expect("some");
            let even = total / mesh.size();
            let most = *loads.iter().max().expect("ranks") as usize;
            assert!(most <= even + largest, "{loads:?} of {total} on {mesh}");
            common::save_step(&checkpoints(&memory), &plan, 3);
            assert_loads(&memory, 3, &common::line(3), Kind::Flat);
            assert_loads(&memory, 3, &mesh, Kind::Columns);
        }
    }
}

#[test]
fn tensors_cut_along_two_dims_load_flat() {
    let mesh = Mesh::new([("shard", 2), ("tensor", 3)]).expect("a mesh");
    let placements = |a, b| Layout {
        placements: vec![a, b],
        cut: burn_fsdp_checkpoint::Cut::Dims,
        owner: None,
    };
    let shard = Placement::Shard;
    let layouts = [
        placements(shard(0), shard(1)),
        placements(shard(1), shard(0)),
        placements(shard(0), shard(0)),
        placements(shard(2), shard(2)),
        placements(Placement::Replicate, shard(1)),
    ];
    let tensors: Vec<_> = layouts
        .into_iter()
        .enumerate()
        .map(|(i, layout)| {
            let name = format!("tensor {i}");
            TensorSpec::new(name, [5, 7, 4], Dtype::F32, TensorKind::Parameter, layout)
        })
        .collect();
    let plan = Arc::new(WritePlan::new(&mesh, tensors.clone()).expect("fits"));
    let memory = Memory::new();
    common::save_step(&checkpoints(&memory), &plan, 3);
    let step = checkpoints(&memory).open(3).expect("opens");
    common::assert_whole(&step, &tensors);
    for tensor in &tensors {
        for rank in 0..4 {
            let layout = Layout::flat(&common::line(4), "shard").expect("an axis");
            let region = layout
                .region(&tensor.shape, &common::line(4), rank)
                .expect("fits");
            let got = step.read(&tensor.name, &region).expect("reads");
            assert_eq!(got, common::part_of(tensor, &region));
        }
    }
}

#[test]
fn only_the_chunks_that_are_read_are_verified() {
    let mesh = common::line(3);
    let layout = Layout::flat(&mesh, "shard").expect("an axis");
    let rows = 1000;
    let tensor = TensorSpec::new(
        "big",
        [rows, 2501],
        Dtype::F32,
        TensorKind::Parameter,
        layout,
    );
    let plan = Arc::new(WritePlan::new(&mesh, vec![tensor.clone()]).expect("fits"));
    let memory = Memory::new();
    common::save_step(&checkpoints(&memory), &plan, 3);
    let counting = Arc::new(Faulty::new(memory.clone(), Fail::Never));
    let dir = checkpoints(&memory).path(3);
    let step = Step::open_in(counting.clone(), &dir, Limits::default()).expect("opens");
    common::assert_whole(&step, std::slice::from_ref(&tensor));
    let before = counting.bytes_read();
    let column = Region::Box {
        offsets: vec![0, 2500],
        sizes: vec![rows, 1],
    };
    let got = step.read("big", &column).expect("reads");
    assert_eq!(got, common::part_of(&tensor, &column));
    let all = common::num_bytes(&tensor) as u64;
    assert_eq!(
        counting.bytes_read() - before,
        all,
        "each chunk is read once"
    );
    let before = counting.bytes_read();
    let few = Region::Flat(1_000_000..1_000_003);
    let got = step.read("big", &few).expect("reads");
    assert_eq!(got, common::part_of(&tensor, &few));
    assert!(counting.bytes_read() - before <= 1 << 20, "one chunk");
}

#[test]
fn a_rank_opens_only_the_files_that_it_needs() {
    let memory = Memory::new();
    let plan = common::plan(&common::line(8), Kind::Flat);
    common::save_step(&checkpoints(&memory), &plan, 3);
    let counting = Arc::new(Faulty::new(memory.clone(), Fail::Never));
    let dir = checkpoints(&memory).path(3);
    let step = Step::open_in(counting.clone(), &dir, Limits::default()).expect("opens");
    step.read("embedding.weight", &Region::Flat(20..30))
        .expect("reads");
    let opened = counting.opened.lock().expect("no panic");
    let ranks: Vec<_> = opened
        .iter()
        .filter(|path| path.extension() == Some("safetensors".as_ref()))
        .map(|path| path.file_name().expect("a name").to_owned())
        .collect();
    assert_eq!(ranks, ["rank-00001.safetensors", "rank-00002.safetensors"]);
}

#[test]
fn training_state_round_trips_bit_for_bit() {
    let memory = Memory::new();
    let plan = common::plan(&common::line(2), Kind::Flat);
    let mut request = common::request(&plan, 5);
    let training = &mut request.training;
    training.loss_scale = Some(burn_fsdp_checkpoint::LossScale {
        scale: f64::from_bits(0x3fd5_5555_5555_5555),
        good_steps: 17,
    });
    training.data = burn_fsdp_checkpoint::DataPosition {
        epoch: 2,
        sample: u64::MAX,
    };
    let mut state = 1u64;
    let numbers = std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        f64::from_bits(state)
    });
    let numbers: Vec<_> = numbers.filter(|x| x.is_finite()).take(10_000).collect();
    training
        .sections
        .insert("numbers".to_owned(), numbers.clone().into());
    common::save_all(&checkpoints(&memory), &request)
        .into_iter()
        .for_each(|saved| assert!(saved.is_ok()));
    let step = checkpoints(&memory).newest().expect("opens");
    assert_eq!(step.index().training, request.training);
    let read = step.index().training.sections["numbers"]
        .as_array()
        .expect("a list");
    for (read, number) in read.iter().zip(&numbers) {
        assert_eq!(read.as_f64().map(f64::to_bits), Some(number.to_bits()));
    }
    assert_eq!(step.index().model, request.model);
}

#[test]
fn every_file_is_plain_safetensors() {
    let memory = Memory::new();
    let plan = common::plan(&common::line(3), Kind::Rows);
    common::save_step(&checkpoints(&memory), &plan, 3);
    let mut found = 0;
    for rank in 0..3 {
        let path = Path::new("run/step-000003").join(format!("rank-{rank:05}.safetensors"));
        let bytes = memory.read(&path).expect("there");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("reads");
        for (name, view) in file.tensors() {
            let tensor = plan
                .tensors()
                .iter()
                .find(|t| t.name == name)
                .expect("known");
            let mut rank_part = plan.of_rank(rank).iter();
            let part = rank_part
                .find(|part| plan.tensors()[part.tensor].name == name)
                .expect("assigned");
            assert_eq!(view.data(), common::part_of(tensor, &part.region));
            assert_eq!(view.dtype(), tensor.dtype);
            if tensor.shape.len() > 1 && !tensor.shape.contains(&0) {
                assert_eq!(
                    view.shape()[1..],
                    tensor.shape[1..],
                    "rows keep their shape"
                );
            }
            found += 1;
        }
    }
    assert!(found >= plan.tensors().len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// The parts that all ranks write contain every element once, and each rank reads exactly the elements that it
    /// requests.
    #[test]
    fn plans_cover_every_element_once(
        shape in prop::collection::vec(0usize..7, 0..4),
        replicas in 1usize..4,
        shards in 1usize..9,
        kind in prop::sample::select(KINDS.to_vec()),
    ) {
        let mesh = Mesh::new([("replicate", replicas), ("shard", shards)]).expect("a mesh");
        let layout = common::layout(kind, &mesh, &shape);
        let tensor = TensorSpec::new("t", shape.clone(), Dtype::U8, TensorKind::Parameter, layout);
        let plan = WritePlan::new(&mesh, vec![tensor]).expect("fits");
        let total: usize = shape.iter().product();
        let numbers: Vec<u8> = (0..total).map(|i| i as u8).collect();
        let mut written: Vec<u8> = (0..mesh.size())
            .flat_map(|rank| plan.of_rank(rank))
            .flat_map(|part| common::cut_out(&numbers, &shape, 1, &part.region))
            .collect();
        written.sort_unstable();
        let mut expected = numbers;
        expected.sort_unstable();
        prop_assert_eq!(written, expected);
    }
}
