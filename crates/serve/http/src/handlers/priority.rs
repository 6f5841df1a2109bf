//! Which values of a request's `priority` come first: the larger ones or, as in vLLM, the smaller
//! ones. The engine knows the first meaning only.

/// The meaning of `priority` in requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PriorityOrder {
    /// Requests with a larger priority come first.
    #[default]
    LargerFirst,
    /// Requests with a smaller priority come first, as in vLLM.
    SmallerFirst,
}

impl PriorityOrder {
    /// The priority for the engine. A request without one has 0.
    pub(crate) fn of(self, priority: Option<i32>) -> i32 {
        let priority = priority.unwrap_or(0);
        match self {
            PriorityOrder::LargerFirst => priority,
            // The negation saturates, so the two smallest values get the same priority.
            PriorityOrder::SmallerFirst => priority.saturating_neg(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: as in vLLM, a smaller value comes first, and a request without one has 0.
    #[test]
    fn smaller_values_come_first_as_in_vllm() {
        let order = |order: PriorityOrder| {
            let given = [Some(i32::MIN), Some(-1), None, Some(1), Some(i32::MAX)];
            given.map(|priority| order.of(priority))
        };
        assert!(order(PriorityOrder::LargerFirst).is_sorted_by(|a, b| a < b));
        assert!(order(PriorityOrder::SmallerFirst).is_sorted_by(|a, b| a > b));
        assert_eq!(PriorityOrder::SmallerFirst.of(Some(0)), PriorityOrder::SmallerFirst.of(None));
    }
}
