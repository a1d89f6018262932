//! The modules that contain a parameter, and which of them a pattern means.

use burn_fsdp_mesh::Pattern;

/// Returns the modules that contain the parameter at `path`, outermost first.
pub(crate) fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('.').map(|(end, _)| &path[..end])
}

/// Returns the innermost module that `pattern` means and that contains the parameter at `path`.
pub(crate) fn module_of<'a>(pattern: &Pattern, path: &'a str) -> Option<&'a str> {
    let (module, _) = path.rsplit_once('.')?;
    pattern.prefix_of(module)
}

/// Returns true if `pattern` means a module that contains the parameter at `path`.
pub(crate) fn is_around(pattern: &Pattern, path: &str) -> bool {
    module_of(pattern, path).is_some()
}

#[cfg(test)]
mod tests {
    use burn_fsdp_mesh::Pattern;

    use super::module_of;

    fn matches(pattern: &str, module: &str) -> bool {
        let parameter = format!("{module}.weight");
        module_of(&Pattern::new(pattern), &parameter) == Some(module)
    }

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
