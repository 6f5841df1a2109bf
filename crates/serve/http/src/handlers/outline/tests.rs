use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use stolon::NodeDump;

use super::*;

/// A random tree in which the children of a node come at any place after it.
fn random_tree(rng: &mut ChaCha8Rng, nodes: usize) -> TreeDump {
    let node = |index: usize| {
        let parent = rng.next_u32() as usize % (index + 1);
        let tokens = 16 * (1 + rng.next_u32() as usize % 8);
        NodeDump {
            parent: (parent < index).then_some(parent),
            namespace: Namespace::default(),
            last_hash: index as u64,
            block_count: tokens / 16,
            position_count: tokens,
            first_positions: Vec::new(),
            checkpoint: false,
            locks: 0,
            hits: 0,
            last_use: 0,
        }
    };
    TreeDump { version: 1, nodes: (0..nodes).map(node).collect() }
}

/// The nodes at and below `root`, found from the parents alone.
fn subtree(dump: &TreeDump, root: usize) -> Vec<usize> {
    let below = |&index: &usize| {
        let mut at = Some(index);
        while at.is_some_and(|at| at != root) {
            at = at.and_then(|at| dump.nodes[at].parent);
        }
        at.is_some()
    };
    (0..dump.nodes.len()).filter(below).collect()
}

fn tokens(dump: &TreeDump, nodes: &[usize]) -> usize {
    nodes.iter().map(|&index| dump.nodes[index].position_count).sum()
}

/// Goal: for every size of the tree and of the outline, each token is either in a listed node or
/// counted once as hidden, and listed nodes have their parents before them.
#[test]
fn an_outline_accounts_for_every_token() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for round in 0..300 {
        let dump = random_tree(&mut rng, 1 + round % 60);
        let count = 1 + rng.next_u32() as usize % 70;
        let root = (round % 3 == 0).then(|| rng.next_u32() as usize % dump.nodes.len());
        let pin = rng.next_u32() as usize % dump.nodes.len();
        let pins = PinsByHash::from([(pin as u64, vec![7, 9])]);
        let all: Vec<usize> =
            root.map_or_else(|| (0..dump.nodes.len()).collect(), |root| subtree(&dump, root));
        let outline = Selection::new(&dump, &pins, root, count).describe(None);
        assert_eq!(outline.nodes.len(), count.min(all.len()));
        let listed = |sum: fn(&OutlineNode) -> usize| outline.nodes.iter().map(sum).sum::<usize>();
        let shown = listed(|node| node.tokens + node.hidden_tokens) + outline.hidden_tokens;
        assert_eq!(shown, tokens(&dump, &all));
        let counted = listed(|node| 1 + node.hidden_nodes) + outline.hidden_nodes;
        assert_eq!(counted, all.len());
        for (place, node) in outline.nodes.iter().enumerate() {
            let index = parse_id("id", &node.id).expect("a hash") as usize;
            assert!(node.parent.is_none_or(|parent| parent < place));
            let below = subtree(&dump, index);
            assert_eq!(node.subtree_tokens, tokens(&dump, &below));
            assert_eq!(node.pinned, if below.contains(&pin) { 2 } else { 0 });
            assert_eq!(node.pins.len(), if index == pin { 2 } else { 0 });
            let parent = node.parent.map(|place| outline.nodes[place].id.clone());
            let expected = dump.nodes[index].parent.filter(|_| Some(index) != root);
            assert_eq!(parent, expected.map(|index| hex(index as u64)));
        }
    }
}

/// Goal: nodes that a request or a pin holds are listed before larger ones.
#[test]
fn held_nodes_come_first() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut dump = random_tree(&mut rng, 40);
    for index in 0..dump.nodes.len() {
        dump.nodes[index].parent = None;
    }
    dump.nodes[17].locks = 1;
    let outline = Selection::new(&dump, &PinsByHash::new(), None, 1).describe(None);
    assert_eq!(outline.nodes[0].id, hex(17));
    assert_eq!((outline.hidden_nodes, outline.total_nodes), (39, 40));
}

/// Goal: ids are 16 hexadecimal digits and nothing else.
#[test]
fn ids_are_parsed() {
    assert_eq!(parse_id("id", "00000000000000fF").ok(), Some(255));
    for bad in ["", "ff", "+0000000000000ff", "00000000000000fg", "00000000000000000"] {
        assert!(parse_id("id", bad).is_err(), "{bad}");
    }
}
