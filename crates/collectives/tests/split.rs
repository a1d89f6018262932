//! Smaller groups, and meshes of them.

mod ranks;

use burn_fsdp_collectives::{Error, LaunchConfig, Mesh, OperationKind, ProcessMesh};
use ranks::{gather, observe, run};

#[test]
fn ranks_of_one_color_form_a_group() {
    let groups = run(4, |world| {
        let half = world.split(world.rank() % 2, 0, "half")?;
        let heard = half.exchange("who", vec![world.rank() as u8])?;
        Ok((
            half.rank(),
            half.size(),
            half.world_rank(),
            half.name().to_owned(),
            heard.concat(),
        ))
    });
    let name = || "half".to_owned();
    assert_eq!(groups[0], (0, 2, 0, name(), vec![0, 2]));
    assert_eq!(groups[1], (0, 2, 1, name(), vec![1, 3]));
    assert_eq!(groups[2], (1, 2, 2, name(), vec![0, 2]));
    assert_eq!(groups[3], (1, 2, 3, name(), vec![1, 3]));
}

#[test]
fn keys_order_the_new_ranks() {
    let ranks = run(3, |world| {
        let reversed = world.split(7, 10 - world.rank(), "reversed")?;
        Ok((
            reversed.rank(),
            reversed.exchange("who", vec![world.rank() as u8])?.concat(),
        ))
    });
    let order = vec![2, 1, 0];
    assert_eq!(ranks, [(2, order.clone()), (1, order.clone()), (0, order)]);
}

#[test]
fn groups_number_their_own_operations() {
    let gathered = run(4, |world| {
        let half = world.split(world.rank() / 2, 0, "half")?;
        // Different numbers of operations in the two halves do not affect the world.
        for _ in 0..=world.rank() / 2 {
            gather(&half, "x", 3)?;
        }
        let quarter = half.split(world.rank(), 0, "quarter")?;
        quarter.barrier("alone")?;
        let all = gather(&world, "all", 6)?;
        let gathers = half.counts().of(OperationKind::AllGather).operations;
        Ok((all.len(), gathers, quarter.size()))
    });
    assert_eq!(gathered, [(6, 1, 1), (6, 1, 1), (6, 2, 1), (6, 2, 1)]);
}

#[test]
fn names_must_agree() {
    let seen = observe(2, ranks::LONG, |world| {
        let name = if world.rank() == 0 { "left" } else { "right" };
        world.split(world.rank(), 0, name).map(|_| ())
    });
    for result in seen {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("split into left"), "{error}");
    }
}

#[test]
fn a_mesh_has_a_group_along_each_axis() {
    let seen = run(4, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::new([("replicate", 2), ("shard", 2)])?)?;
        let along = |axis: &str| mesh.along(axis)?.exchange("who", vec![world.rank() as u8]);
        let groups = (along("replicate")?.concat(), along("shard")?.concat());
        assert_eq!(mesh.along("shard")?.rank(), mesh.coordinate()[1]);
        assert_eq!(mesh.along("shard")?.name(), "shard");
        assert_eq!((mesh.mesh().size(), mesh.world().size()), (4, 4));
        Ok((mesh.coordinate().to_vec(), groups))
    });
    assert_eq!(seen[0], (vec![0, 0], (vec![0, 2], vec![0, 1])));
    assert_eq!(seen[1], (vec![0, 1], (vec![1, 3], vec![0, 1])));
    assert_eq!(seen[2], (vec![1, 0], (vec![0, 2], vec![2, 3])));
    assert_eq!(seen[3], (vec![1, 1], (vec![1, 3], vec![2, 3])));
}

#[test]
fn an_axis_of_all_ranks_is_the_world() {
    let seen = run(3, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::new([("replicate", 1), ("shard", 3)])?)?;
        let splits = world.counts().of(OperationKind::Exchange).operations;
        Ok((
            mesh.along("shard")?.name().to_owned(),
            mesh.along("replicate")?.size(),
            splits,
        ))
    });
    assert_eq!(seen, vec![("world".to_owned(), 1, 1); 3]);
}

#[test]
fn a_mesh_must_fit_the_world() {
    let config = LaunchConfig::new(2);
    let error = ranks::fail(config, |world| {
        ProcessMesh::new(&world, Mesh::line("shard", 3)?).map(|_| ())
    });
    let message = error.to_string();
    assert!(
        message.contains("mesh shard=3 has 3 ranks, but group \"world\" has 2; make the product"),
        "{message}"
    );
    let error = ranks::fail(config, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        mesh.along("tensor").map(|_| ())
    });
    assert!(
        error.to_string().contains("has no axis \"tensor\""),
        "{error}"
    );
}

#[test]
fn groups_are_equal_if_their_ordered_ranks_are() {
    run(4, |world| {
        let pairs = |color: usize, name: &str| world.split(color, 0, name);
        let halves = pairs(world.rank() / 2, "shard")?;
        let again = pairs(world.rank() / 2, "another name")?;
        let crossed = pairs(world.rank() % 2, "shard")?;
        let reversed = world.split(world.rank() / 2, 4 - world.rank(), "shard")?;
        assert_eq!(halves, again);
        assert_eq!(halves.id(), again.id());
        // Groups with the same name and size, and even with the same ranks in a different order.
        assert_ne!(halves, crossed);
        assert_ne!(halves, reversed);
        assert_ne!(halves, world);
        assert_eq!(world, world.clone());
        let first = 2 * (world.rank() / 2);
        assert_eq!(halves.members(), [first, first + 1]);
        assert_eq!(reversed.members(), [first + 1, first]);
        let quarter = reversed.split(0, reversed.rank(), "same")?;
        assert_eq!(quarter, reversed);

        let mesh = |axes: [(&str, usize); 2]| ProcessMesh::new(&world, Mesh::new(axes)?);
        let one = mesh([("replicate", 2), ("shard", 2)])?;
        let other = mesh([("shard", 2), ("replicate", 2)])?;
        assert_ne!(one.along("shard")?, other.along("shard")?);
        assert_eq!(one.along("shard")?, other.along("replicate")?);
        assert_eq!(one.along("shard")?, &halves);
        Ok(())
    });
}

#[test]
fn groups_of_different_launches_differ() {
    let world = burn_fsdp_collectives::ProcessGroup::solo();
    assert_ne!(world, burn_fsdp_collectives::ProcessGroup::solo());
    let fake = burn_fsdp_collectives::ProcessGroup::fake(4, 3);
    assert_eq!(fake.members(), [0, 1, 2, 3]);
    let mesh = Mesh::new([("replicate", 2), ("shard", 2)]).unwrap();
    let mesh = ProcessMesh::new(&fake, mesh).unwrap();
    assert_eq!(mesh.along("shard").unwrap().members(), [2, 3]);
    assert_eq!(mesh.along("replicate").unwrap().members(), [1, 3]);
}

#[test]
fn meshes_must_agree() {
    let seen = observe(4, ranks::LONG, |world| {
        let axes = match world.rank() {
            3 => [("shard", 2), ("replicate", 2)],
            _ => [("replicate", 2), ("shard", 2)],
        };
        ProcessMesh::new(&world, Mesh::new(axes)?).map(|_| ())
    });
    for result in seen {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}
