use std::time::Duration;

use proptest::prelude::*;

use super::*;

const ORDERS: [PrefillOrder; 3] =
    [PrefillOrder::Arrival, PrefillOrder::Priority, PrefillOrder::FewestLeft];

fn view(computed: usize, tokens: usize) -> SequenceView {
    SequenceView {
        computed,
        committed: 0,
        tokens,
        covered: tokens,
        last_step: 0,
        arrival: 0,
        class: 0,
        tenant: TenantId::default(),
        chunk_max: usize::MAX,
        image: None,
        chunk_rows: LogitRows::None,
        last_rows: LogitRows::Last,
        paused: false,
    }
}

/// Views that arrived in this order.
fn arrived<const N: usize>(mut views: [SequenceView; N]) -> [SequenceView; N] {
    for (arrival, view) in views.iter_mut().enumerate() {
        view.arrival = arrival as u64;
    }
    views
}

fn plan_of(views: &[SequenceView], tokens: usize) -> Vec<Slice> {
    let limits = StepLimits { tokens, timed: usize::MAX, tenant: None };
    plan(views, limits, PrefillOrder::FewestLeft)
}

fn counts(slices: &[Slice]) -> Vec<(usize, usize, usize)> {
    slices.iter().map(|slice| (slice.index, slice.start, slice.count)).collect()
}

#[test]
fn decodes_and_prefill_chunks_share_a_step() {
    let views = arrived([view(0, 100), view(50, 51), view(0, 20)]);
    let slices = plan_of(&views, 64);
    assert_eq!(counts(&slices), [(0, 0, 48), (1, 50, 1), (2, 0, 15)]);
    assert_eq!(slices[0].rows, LogitRows::None);
    assert_eq!(slices[1].rows, LogitRows::Last);
}

#[test]
fn the_last_chunk_of_a_prompt_gets_logits_for_its_last_row() {
    let slices = plan_of(&arrived([view(64, 100), view(0, 8)]), 64);
    assert_eq!(counts(&slices), [(0, 64, 36), (1, 0, 8)]);
    assert!(slices.iter().all(|slice| slice.rows == LogitRows::Last));
}

#[test]
fn a_full_hit_computes_one_position_and_writes_none() {
    let slices = plan_of(&[view(96, 96)], 64);
    assert_eq!(
        slices,
        [Slice { index: 0, start: 95, count: 1, write_from: 96, rows: LogitRows::Last }]
    );
}

#[test]
fn a_paused_or_uncovered_sequence_takes_no_part() {
    let mut views = [view(16, 17), view(16, 17), view(16, 17)];
    views[0].paused = true;
    views[1].covered = 16;
    assert_eq!(counts(&plan_of(&views, 64)), [(2, 16, 1)]);
}

#[test]
fn sequences_with_logits_for_all_rows_are_computed_in_small_chunks() {
    let mut views = arrived([view(0, 1000), view(0, 10)]);
    views[0].chunk_max = 32;
    (views[0].chunk_rows, views[0].last_rows) = (LogitRows::All, LogitRows::All);
    let slices = plan_of(&views, 512);
    assert_eq!(counts(&slices), [(0, 0, 32), (1, 0, 10)]);
    assert_eq!(slices[0].rows, LogitRows::All);
}

/// Goal: a short prompt is computed alongside long ones, in its first step; without short ones, the
/// long ones are computed one after the other.
#[test]
fn a_short_prompt_does_not_wait_for_long_ones() {
    let views = arrived([view(0, 6000), view(0, 6000), view(0, 300), view(0, 5)]);
    let slices = plan_of(&views, 512);
    assert_eq!(counts(&slices), [(0, 0, 384), (2, 0, 123), (3, 0, 5)]);
    assert_eq!(counts(&plan_of(&views[..2], 512)), [(0, 0, 512)]);
}

#[test]
fn each_order_has_its_own_rule() {
    let mut views = arrived([view(0, 600), view(0, 500), view(0, 100), view(0, 100)]);
    views[1].class = 1;
    let limits = StepLimits { tokens: 400, timed: 512, tenant: None };
    let of = |order| counts(&plan(&views, limits, order));
    assert_eq!(of(PrefillOrder::Arrival), [(0, 0, 400)]);
    assert_eq!(of(PrefillOrder::Priority), [(0, 0, 300), (1, 0, 100)]);
    assert_eq!(of(PrefillOrder::FewestLeft), [(0, 0, 300), (1, 0, 100)]);
    views[1].class = 0;
    let of = |order| counts(&plan(&views, limits, order));
    assert_eq!(of(PrefillOrder::Priority), [(0, 0, 400)]);
    assert_eq!(of(PrefillOrder::FewestLeft), [(0, 0, 300), (2, 0, 100)]);
}

/// Goal: tenants share prefill tokens equally, and what one cannot use goes to the others.
#[test]
fn tenants_share_prefill_tokens() {
    let mut views = arrived([view(0, 6000), view(0, 6000), view(0, 900), view(0, 60)]);
    let [b, c] = ["b", "c"].map(|name| TenantId::new(Some(name)));
    (views[2].tenant, views[3].tenant) = (b, c);
    let tokens_of = |slices: &[Slice], index| {
        slices.iter().filter(|slice| slice.index == index).map(|slice| slice.count).sum::<usize>()
    };
    let slices = plan_of(&views, 512);
    assert_eq!([0, 1, 2, 3].map(|index| tokens_of(&slices, index)), [226, 0, 226, 60]);
    // With fewer tokens than tenants, those that waited longest come first.
    (views[0].last_step, views[1].last_step, views[2].last_step) = (7, 7, 3);
    let slices = plan_of(&views, 2);
    assert_eq!([0, 1, 2, 3].map(|index| tokens_of(&slices, index)), [0, 0, 1, 1]);
}

/// 3 ms for a step, 1 ms for each decode and 0.1 ms for each prompt token.
fn cost() -> StepCost {
    let mut cost = StepCost::default();
    for _ in 0..100 {
        for decodes in 1..4 {
            let decode = StepWork::decode(0.0);
            let work = (1..decodes).fold(decode, |work, _| work.and(decode));
            cost.note(work, Duration::from_millis(3 + decodes));
            cost.note(StepWork::prompt(0.0, 100.0).and(work), Duration::from_millis(13 + decodes));
            cost.note(StepWork::prompt(500.0, 50.0), Duration::from_millis(8));
        }
    }
    cost
}

/// Goal: while one tenant waits for a token, another one lengthens the step by a limited time: as
/// many prompt tokens as fit, but at least a few, and as many decodes, at least one, by turns.
#[test]
fn a_tenant_lengthens_a_step_that_others_wait_for_by_a_limited_time() {
    let (a, b) = (TenantId::new(Some("a")), TenantId::new(Some("b")));
    let of = |tenant, view| SequenceView { tenant, ..view };
    let at_most = |seconds| {
        let tenant = Some(TenantLimit { cost: cost(), seconds });
        StepLimits { tokens: 512, timed: usize::MAX, tenant }
    };
    let tokens_of = |views: &[SequenceView], limits, tenant| -> usize {
        let slices = plan(views, limits, PrefillOrder::FewestLeft);
        let own = slices.iter().filter(|slice| views[slice.index].tenant == tenant);
        own.map(|slice| slice.count).sum()
    };
    // The other one decodes, or has a short prompt.
    for other in [view(50, 51), view(0, 5)] {
        let views = arrived([of(a, view(0, 6_000)), of(b, other), of(a, view(0, 6_000))]);
        for (seconds, tokens) in [(0.0, 32..33), (0.003, 32..33), (0.01, 95..106)] {
            let got = tokens_of(&views, at_most(seconds), a);
            assert!(tokens.contains(&got), "{seconds} s: {got}");
            assert_eq!(tokens_of(&views, at_most(seconds), b), other.pending());
        }
    }
    // No tenant waits for a single token, or only this one does.
    let views = arrived([of(a, view(0, 6_000)), of(b, view(0, 6_000))]);
    assert_eq!(tokens_of(&views, at_most(0.0), a), 256);
    let views = arrived([of(a, view(0, 6_000)), of(a, view(50, 51)), of(a, view(50, 51))]);
    assert_eq!(tokens_of(&views, at_most(0.0), a), 512);

    let mut views = arrived([of(b, view(50, 51)); 8]);
    (0..7).for_each(|index| views[index].tenant = a);
    for (seconds, count) in [(0.0, 1), (0.0035, 3), (1.0, 7)] {
        assert_eq!(tokens_of(&views, at_most(seconds), a), count, "{seconds} s");
        assert_eq!(tokens_of(&views, at_most(seconds), b), 1);
    }
    // All of them take part in one of three steps.
    let mut turns = [0; 8];
    for step in 1..=3 {
        for slice in plan(&views, at_most(0.0035), PrefillOrder::FewestLeft) {
            views[slice.index].last_step = step;
            turns[slice.index] += 1;
        }
    }
    assert!(turns[..7].iter().all(|&turns| turns > 0) && turns[7] == 3, "{turns:?}");
}

proptest! {
    /// Goal: a step never exceeds its limits, never contains a sequence twice or tokens that it
    /// does not have, and every sequence makes progress, however small the step. A prompt is
    /// overtaken by at most a third of the tokens of its tenant that it and the earlier prompts
    /// have left.
    #[test]
    fn every_sequence_makes_progress_within_its_bound(
        shapes in prop::collection::vec((0usize..40, 1usize..40, 0u64..3, -1i32..2, 0u64..60), 1..20),
        timed in 1usize..200,
        tokens in 1usize..150,
        order in prop::sample::select(ORDERS.to_vec()),
        limited in any::<bool>(),
    ) {
        let tenant = [None, Some(TenantLimit { cost: cost(), seconds: 0.004 })];
        let limits = StepLimits { tokens, timed, tenant: tenant[usize::from(limited)] };
        let mut views: Vec<SequenceView> = Vec::new();
        for (arrival, &(computed, more, tenant, class, _)) in shapes.iter().enumerate() {
            let tenant = TenantId::new(Some(&tenant.to_string()));
            let view = view(computed, computed + more);
            views.push(SequenceView { arrival: arrival as u64, tenant, class, ..view });
        }
        let starts = |index: usize| (0..=index).map(|i| shapes[i].4).max().unwrap_or(0);
        let goal: Vec<usize> = views.iter().map(|view| view.tokens + 5).collect();
        let prompts: Vec<usize> = views.iter().map(|view| view.tokens).collect();
        let mut bounds: Vec<Option<usize>> = vec![None; views.len()];
        let mut overtaken = vec![0; views.len()];
        for step in 1..3000u64 {
            for (index, view) in views.iter_mut().enumerate() {
                view.paused = view.computed >= goal[index] || starts(index) >= step;
            }
            if (0..views.len()).all(|index| views[index].computed >= goal[index]) {
                return Ok(());
            }
            let left = |i: usize| prompts[i].saturating_sub(views[i].computed);
            for index in 0..views.len() {
                let earlier = (0..=index).filter(|&i| views[i].tenant == views[index].tenant);
                if starts(index) < step && bounds[index].is_none() {
                    bounds[index] = Some(earlier.map(left).sum::<usize>() / 3);
                }
            }
            let slices = plan(&views, limits, order);
            let sum = |of: &dyn Fn(&&Slice) -> bool| {
                slices.iter().filter(of).map(|slice| slice.count).sum::<usize>()
            };
            prop_assert!(!slices.is_empty() || views.iter().all(|view| view.paused));
            prop_assert!(sum(&|_| true) <= tokens);
            let prefill = sum(&|slice| !views[slice.index].is_decode());
            prop_assert!(prefill <= TIMED_PREFILL_MIN || prefill <= timed);
            prop_assert!(slices.is_sorted_by(|a, b| a.index < b.index));
            // A prompt that the step completes does not wait for the others of the step.
            let completes = |slice: &Slice| slice.start + slice.count == views[slice.index].tokens;
            let completed: Vec<usize> =
                slices.iter().filter(|s| completes(s)).map(|slice| slice.index).collect();
            let waits = |&index: &usize| left(index) > 1 && !completed.contains(&index);
            for index in (0..views.len()).filter(waits) {
                let later = |slice: &&Slice| {
                    slice.index > index
                        && views[slice.index].tenant == views[index].tenant
                        && !views[slice.index].is_decode()
                };
                overtaken[index] += if starts(index) < step { sum(&later) } else { 0 };
                let bound = bounds[index].unwrap_or(usize::MAX);
                prop_assert!(overtaken[index] <= bound, "{index} {overtaken:?} {bounds:?}");
            }
            for slice in slices {
                let view = &mut views[slice.index];
                prop_assert!(slice.start + slice.count <= view.tokens);
                view.computed = slice.start + slice.count;
                view.last_step = step;
                if view.computed == view.tokens {
                    view.tokens += 1;
                    view.covered += 1;
                }
            }
        }
        prop_assert!(false, "a sequence starved");
    }
}

/// Goal: prompts that are computed as a whole are never divided, a step is not filled beyond its
/// tokens by more than one of them, a short one of another tenant is in the first step, and all are
/// computed in the end.
#[test]
fn whole_prompts_are_not_divided_and_keep_no_short_one_waiting() {
    for tokens in [64, 256, 2048] {
        let whole = |len| SequenceView { image: Some((0, len)), ..view(0, len) };
        let mut views = arrived([500; 9].map(whole));
        views[8] = SequenceView { tenant: TenantId::new(Some("other")), ..views[8] };
        views[8].tokens = 20;
        (views[8].image, views[8].covered) = (Some((0, 20)), 20);
        let mut left: Vec<usize> = (0..views.len()).collect();
        for step in 1.. {
            let waiting: Vec<SequenceView> = left.iter().map(|&index| views[index]).collect();
            let slices = plan_of(&waiting, tokens);
            assert!(!slices.is_empty(), "{tokens}: step {step}");
            for slice in &slices {
                assert_eq!((slice.start, slice.count), (0, waiting[slice.index].tokens));
            }
            let sum: usize = slices.iter().map(|slice| slice.count).sum();
            assert!(sum <= tokens + 500, "{tokens}: {sum} tokens");
            let done: Vec<usize> = slices.iter().map(|slice| left[slice.index]).collect();
            assert!(step > 1 || done.contains(&8), "{tokens}: the short one waits");
            left.retain(|index| !done.contains(index));
            if left.is_empty() {
                break;
            }
        }
    }
}
