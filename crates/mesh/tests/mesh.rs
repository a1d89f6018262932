//! Tests of meshes: coordinates, sub-groups along axes, and rejected arguments.

use burn_fsdp_mesh::{Error, Mesh};
use proptest::prelude::*;

fn cube() -> Mesh {
    Mesh::new([("pipe", 2), ("replicate", 3), ("shard", 4)]).unwrap()
}

#[test]
fn the_last_axis_is_fastest() {
    let mesh = Mesh::new([("replicate", 2), ("shard", 4)]).unwrap();
    assert_eq!(mesh.size(), 8);
    assert_eq!(mesh.coordinate(0).unwrap(), [0, 0]);
    assert_eq!(mesh.coordinate(3).unwrap(), [0, 3]);
    assert_eq!(mesh.coordinate(4).unwrap(), [1, 0]);
    assert_eq!(mesh.axis("shard").unwrap().size, 4);
    assert_eq!(mesh.to_string(), "replicate=2 x shard=4");
}

#[test]
fn sub_groups_keep_axis_order() {
    let mesh = Mesh::new([("replicate", 2), ("shard", 4)]).unwrap();
    assert_eq!(mesh.ranks_along("shard", 6).unwrap(), [4, 5, 6, 7]);
    assert_eq!(mesh.ranks_along("replicate", 6).unwrap(), [2, 6]);
    assert_eq!(mesh.color_along("shard", 6).unwrap(), 1);
    assert_eq!(mesh.color_along("replicate", 6).unwrap(), 2);
    assert_eq!(cube().ranks_along("replicate", 18).unwrap(), [14, 18, 22]);
}

#[test]
fn a_line_is_one_group() {
    let mesh = Mesh::line("shard", 3).unwrap();
    assert_eq!(mesh.ranks_along("shard", 1).unwrap(), [0, 1, 2]);
    assert_eq!(mesh.color_along("shard", 1).unwrap(), 0);
    assert_eq!(mesh.axes().len(), 1);
}

#[test]
fn refuses_invalid_meshes() {
    assert_eq!(Mesh::new::<String>([]), Err(Error::NoAxes));
    assert_eq!(
        Mesh::line("shard", 0),
        Err(Error::EmptyAxis {
            axis: "shard".into()
        })
    );
    let twice = Mesh::new([("shard", 2), ("shard", 2)]);
    assert_eq!(
        twice,
        Err(Error::DuplicateAxis {
            axis: "shard".into()
        })
    );
    let huge = Mesh::new([("a", usize::MAX), ("b", 2)]);
    assert!(matches!(huge, Err(Error::TooManyRanks { .. })));
}

#[test]
fn refuses_unknown_axes_and_ranks() {
    let mesh = Mesh::new([("replicate", 2), ("shard", 2)]).unwrap();
    assert_eq!(
        mesh.ranks_along("tensor", 0).unwrap_err().to_string(),
        "mesh replicate=2 x shard=2 has no axis \"tensor\"; use one of its axes"
    );
    assert_eq!(
        mesh.coordinate(4).unwrap_err().to_string(),
        "rank 4 is not in mesh replicate=2 x shard=2; its ranks are 0 to 3"
    );
    assert!(mesh.color_along("shard", 4).is_err());
    assert!(mesh.rank(&[0]).is_err());
    assert!(mesh.rank(&[0, 2]).is_err());
    assert!(mesh.rank(&[0, 0, 0]).is_err());
}

#[test]
fn deserialization_validates() {
    let mesh = cube();
    let text = serde_json::to_string(&mesh).unwrap();
    assert_eq!(serde_json::from_str::<Mesh>(&text).unwrap(), mesh);
    let empty = r#"[{"name":"shard","size":0}]"#;
    let error = serde_json::from_str::<Mesh>(empty).unwrap_err().to_string();
    assert!(error.contains("has size 0"), "{error}");
}

proptest! {
    #[test]
    fn rank_and_coordinate_are_inverse(sizes in prop::collection::vec(1usize..5, 1..4)) {
        let mesh = Mesh::new(sizes.iter().enumerate().map(|(i, n)| (format!("axis{i}"), *n))).unwrap();
        for rank in 0..mesh.size() {
            prop_assert_eq!(mesh.rank(&mesh.coordinate(rank).unwrap()).unwrap(), rank);
        }
    }

    #[test]
    fn sub_groups_of_an_axis_are_a_disjoint_cover(sizes in prop::collection::vec(1usize..5, 1..4)) {
        let mesh = Mesh::new(sizes.iter().enumerate().map(|(i, n)| (format!("axis{i}"), *n))).unwrap();
        for axis in mesh.axes() {
            let num_groups = mesh.size() / axis.size;
            for rank in 0..mesh.size() {
                let ranks = mesh.ranks_along(&axis.name, rank).unwrap();
                let color = mesh.color_along(&axis.name, rank).unwrap();
                prop_assert!(color < num_groups);
                let same_color: Vec<_> = (0..mesh.size())
                    .filter(|peer| mesh.color_along(&axis.name, *peer).unwrap() == color)
                    .collect();
                prop_assert_eq!(&ranks, &same_color);
                let own = ranks.iter().position(|peer| *peer == rank);
                let index = mesh.axes().iter().position(|other| other == axis).unwrap();
                prop_assert_eq!(own, Some(mesh.coordinate(rank).unwrap()[index]));
            }
        }
    }
}
