use super::*;

/// Goal: each variant finds its own row.
#[test]
fn rows_are_in_the_order_of_the_variants() {
    for (index, row) in TABLE.iter().enumerate() {
        assert_eq!(row.architecture as usize, index, "{:?}", row.architecture);
    }
}

/// Goal: the README names all architectures and no others, in this order.
#[test]
fn the_readme_names_all_architectures() {
    let readme = include_str!("../../../README.md");
    let (_, list) = readme.split_once("by their `model_type`:").expect("a list");
    let (list, _) = list.split_once('.').expect("the end of the list");
    let listed: Vec<&str> = list.split('`').skip(1).step_by(2).collect();
    assert_eq!(listed, Architecture::all().map(Architecture::name).collect::<Vec<_>>());
}
