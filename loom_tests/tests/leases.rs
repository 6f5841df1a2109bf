//! Leases that end on threads of their own while the writer works.
#![cfg(all(loom, not(crossbeam_loom)))]

use loom::thread;
use stolon_kvcache::Namespace;
use stolon_loom_tests::{explore, put, tree};

/// Goal: when two leases end at the same time, while the writer unlocks the nodes of leases that
/// have ended, neither leaves a locked node.
#[test]
fn two_leases_end_at_once() {
    explore(3, || {
        let (mut writer, _reader) = tree();
        put(&mut writer, &[1], 0);
        put(&mut writer, &[2], 1);
        let leases = [1, 2].map(|token| writer.acquire(&Namespace::default(), &[token]));
        let ends = leases.map(|lease| thread::spawn(move || drop(lease)));
        assert!(writer.counts().locked <= 2);
        for end in ends {
            end.join().expect("the thread does not panic");
        }
        assert_eq!(writer.counts().locked, 0, "a prefix stays locked without a lease");
    });
}
