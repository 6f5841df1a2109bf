//! Guards: functions that take the size of an operator's operands from the rendering's budget
//! before the operator is executed. [`compile`](super::compile) inserts calls of them.

use minijinja::machinery::Instruction;
use minijinja::value::Rest;
use minijinja::{Environment, Error, State, Value};

use super::limits::{Budget, VALUE};

/// The function that makes a list of the result of a slice, which is lazy.
pub(super) const EAGER: &str = "guard: eager";

/// Name of a guard. Templates cannot call it, because it is not an identifier.
type Name = &'static str;
const COMPARED: Name = "guard: compared";
const SUM: Name = "guard: sum";
const PRODUCT: Name = "guard: product";
const INDEX: Name = "guard: index";
const KEYS: Name = "guard: keys";
const ITERATED: Name = "guard: iterated";

/// Takes the cost of an operator with its operands from the budget.
type Charge = fn(&Budget, &[Value]) -> Result<(), Error>;

/// The guard that precedes an instruction, and the number of its operands on the stack. A guard
/// returns its operands as a list, which is put back on the stack.
pub(super) fn before(instruction: &Instruction<'_>) -> Option<(Name, u16)> {
    use Instruction as I;
    match instruction {
        I::StringConcat | I::In | I::CompareAndPreserve(_) => Some((COMPARED, 2)),
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte => Some((COMPARED, 2)),
        // Compares its arguments with those of the iteration before.
        I::CallMethod("changed", Some(operands)) => Some((COMPARED, *operands)),
        I::Add => Some((SUM, 2)),
        I::Mul => Some((PRODUCT, 2)),
        I::GetItem => Some((INDEX, 2)),
        I::BuildMap(pairs) => Some((KEYS, u16::try_from(pairs * 2).ok()?)),
        I::Slice => Some((ITERATED, 4)),
        // A call with one argument may belong to a recursive loop.
        I::PushLoop(_) | I::FastRecurse | I::CallFunction(_, Some(1)) => Some((ITERATED, 1)),
        _ => None,
    }
}

/// Adds the guards to the functions of the environment.
pub(super) fn add(environment: &mut Environment<'static>) {
    let guards: [(Name, Charge); 6] = [
        (COMPARED, charge_compared),
        (SUM, charge_sum),
        (PRODUCT, charge_product),
        (INDEX, charge_index),
        (KEYS, charge_keys),
        (ITERATED, charge_iterated),
    ];
    for (name, charge) in guards {
        environment.add_function(name, move |state: &State<'_, '_>, operands: Rest<Value>| {
            charge(&Budget::of(state), &operands)?;
            // A list is put on the stack in reverse order.
            Ok::<_, Error>(operands.0.into_iter().rev().collect::<Value>())
        });
    }
    environment
        .add_function(EAGER, |state: &State<'_, '_>, value: Value| Budget::of(state).eager(value));
}

/// Values that are read as a whole.
fn charge_compared(budget: &Budget, operands: &[Value]) -> Result<(), Error> {
    operands.iter().try_for_each(|operand| budget.measure(operand).map(drop))
}

fn charge_sum(budget: &Budget, operands: &[Value]) -> Result<(), Error> {
    operands.iter().try_for_each(|operand| match operand.as_bytes() {
        Some(_) => budget.charge_items(operand),
        // minijinja copies the items only once in 32 additions.
        None => budget.charge_values(operand.len().unwrap_or(0) / 32 + 1),
    })
}

fn charge_product(budget: &Budget, operands: &[Value]) -> Result<(), Error> {
    let factors = operands.iter().map(|value| value.as_usize().unwrap_or(1));
    let factor = factors.max().unwrap_or(1);
    operands.iter().try_for_each(|operand| {
        let len = operand.as_str().map(str::len).or_else(|| Some(operand.len()? * VALUE));
        budget.charge(len.unwrap_or(VALUE).saturating_mul(factor.max(1)))
    })
}

/// A container and a key, which is hashed or compared.
fn charge_index(budget: &Budget, operands: &[Value]) -> Result<(), Error> {
    let [container, key] = operands else { return Ok(()) };
    budget.charge_iterated(container)?;
    budget.measure(key).map(drop)
}

/// Keys and values of a mapping by turns. The keys are hashed.
fn charge_keys(budget: &Budget, operands: &[Value]) -> Result<(), Error> {
    operands.iter().step_by(2).try_for_each(|key| budget.measure(key).map(drop))
}

fn charge_iterated(budget: &Budget, operands: &[Value]) -> Result<(), Error> {
    operands.iter().try_for_each(|operand| budget.charge_iterated(operand))
}
