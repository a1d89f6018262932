//! Patterns of module paths.

/// The modules that contain the parameter at `path`, outermost first.
pub(crate) fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('.').map(|(end, _)| &path[..end])
}

/// Whether the module at `path` matches `pattern`. `*` stands for any characters of one segment, `**`
/// for any number of segments.
pub(crate) fn matches(pattern: &str, path: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('.').collect();
    let path: Vec<&str> = path.split('.').collect();
    match_segments(&pattern, &path)
}

/// Whether a module that contains the parameter at `path` matches `pattern`.
pub(crate) fn matches_ancestor(pattern: &str, path: &str) -> bool {
    ancestors(path).any(|module| matches(pattern, module))
}

fn match_segments(pattern: &[&str], path: &[&str]) -> bool {
    match (pattern.split_first(), path.split_first()) {
        (None, None) => true,
        (Some((&"**", rest)), _) => {
            (0..=path.len()).any(|skip| match_segments(rest, &path[skip..]))
        }
        (Some((first, pattern)), Some((name, path))) => {
            match_segment(first.as_bytes(), name.as_bytes()) && match_segments(pattern, path)
        }
        _ => false,
    }
}

fn match_segment(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|skip| match_segment(rest, &name[skip..])),
        Some((byte, rest)) => name
            .split_first()
            .is_some_and(|(first, name)| first == byte && match_segment(rest, name)),
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_one_segment() {
        assert!(matches("blocks.*", "blocks.11"));
        assert!(!matches("blocks.*", "blocks"));
        assert!(!matches("blocks.*", "blocks.1.fc"));
        assert!(matches("*.layers.*", "encoder.layers.0"));
        assert!(matches("head", "head"));
    }

    #[test]
    fn a_star_stands_for_a_part_of_a_segment() {
        assert!(matches("conv*", "conv1"));
        assert!(matches("conv*", "conv"));
        assert!(matches("*norm*", "prenorm2"));
        assert!(!matches("conv*", "deconv"));
        assert!(!matches("conv*", "conv1.inner"));
    }

    #[test]
    fn two_stars_stand_for_any_segments() {
        assert!(matches("**.norm", "norm"));
        assert!(matches("**.norm", "blocks.3.norm"));
        assert!(matches("encoder.**.fc", "encoder.layers.0.fc"));
        assert!(matches("encoder.**.fc", "encoder.fc"));
        assert!(!matches("encoder.**.fc", "decoder.fc"));
    }
}
