"""The suite passes for every rule, and catches faults that were found in public code.

Each mutant is a few lines on top of a rule, named after the fault.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch

from fedopt_flwr.algorithm import weighted_sum
from fedopt_flwr.algorithms import (
    ALGORITHMS,
    FANT,
    STEM,
    AutoFed,
    DeltaSGD,
    FAdamGC,
    FedAdam,
    FedAMS,
    FedAvg,
    FedAvgM,
    FedAvgWithMomentum,
    FedDyn,
    FedExP,
    FedMoS,
    FedProx,
    FedSPS,
    LocalAdam,
    MimeLite,
    PAdaMFed,
    PAdaMFedDoG,
    Scaffold,
    ScaffoldM,
    ScaffoldMVR,
)
from fedopt_flwr.conformance import verify_rule


@cache
def failed(kind: Any) -> list[str]:
    return [outcome.check for outcome in verify_rule(kind) if outcome.verdict == "failed"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rule_conforms(name: str) -> None:
    outcomes = verify_rule(ALGORITHMS[name])
    assert [(o.check, o.note) for o in outcomes if o.verdict == "failed"] == []
    assert sum(outcome.verdict == "passed" for outcome in outcomes) >= 9


class ControlVariateOfTheWrongSign(Scaffold):
    def client_update(self, received, client_state, objective):
        flipped = {"control_variate": -client_state["control_variate"]}
        upload, state = super().client_update(received, flipped, objective)
        return upload, {"control_variate": -state["control_variate"]}


class ControlVariateStartedAsTheModel(Scaffold):
    def client_start(self, received, client_state, objective):
        c_i = received["model"].clone()
        return {"control_variate": c_i}, {"control_variate": c_i}


class ControlVariateStartedAtRandom(Scaffold):
    def client_start(self, received, client_state, objective):
        c_i = torch.linspace(3, 5, received["model"].numel())
        return {"control_variate": c_i}, {"control_variate": c_i}


class ControlVariateSentInsteadOfItsChange(PAdaMFed):
    def client_update(self, received, client_state, objective):
        upload, state = super().client_update(received, client_state, objective)
        return {**upload, "control_variate_change": state["control_variate"]}, state


class OneOverEpochsInsteadOfOneOverStepsAndRate(Scaffold):
    def _change(self, delta, d, num_steps):
        return delta.div(-1.0).sub_(d)


class LearningRateOfAnotherStepUnderASchedule(Scaffold):
    def _change(self, delta, d, num_steps):
        return delta.div(-0.2 * num_steps).sub_(d)  # the first round's η, whatever this one's


class SamplesTimesEpochsTakenForSteps(ScaffoldM):
    def server_update(self, state, replies):
        following = super().server_update(state, replies)
        return following.replace(server_momentum=following["server_momentum"] / 10)


class ChangesAddedWithoutSOverN(PAdaMFed):
    def server_update(self, state, replies):
        following = super().server_update(state, replies)
        change = weighted_sum([(r.weight, r.upload["control_variate_change"]) for r in replies])
        return following.replace(control_variate=state["control_variate"] + change)


class DividedByThePlannedNumberAfterDropOuts(FedAvg):
    def server_update(self, state, replies):
        share = 1 / state.plan.clients_per_round
        delta = weighted_sum([(share, r.upload["delta"]) for r in replies])
        return state.replace(model=state["model"] + delta)


class NumberOfClientsTakenAsThoseConnected(ScaffoldMVR):
    def server_update(self, state, replies):
        following, connected = super().server_update(state, replies), len(replies)
        change = sum(r.upload["control_variate_change"] / connected for r in replies)
        return following.replace(control_variate=state["control_variate"] + change)


class RepliesConsumedTwice(Scaffold):
    def server_update(self, state, replies):
        once = iter(replies)
        deltas = [(r.weight, r.upload["delta"]) for r in once]
        c = state["control_variate"] + sum(r.importance * r.upload["delta"] for r in once)
        return state.replace(model=state["model"] + weighted_sum(deltas), control_variate=c)


class PreviousBatchSubtracted(FedMoS):
    """The gradient of the batch before at the point before: no local momentum is left."""

    def client_update(self, received, client_state, objective):
        x, eta = received["model"], self.client_learning_rate
        d, y, last = objective.full_gradient(x), x, None
        for batch in objective.batches():
            gradient = objective.gradient(y, batch)
            if last is not None:
                d = gradient + (1 - self.local_momentum) * (d - last)
            last = gradient.clone()
            y = y - eta * d - self.proximal_strength * (y - x)
        return {"delta": y - x}, {}


class ServerDividesByEpochs(FedMoS):
    def server_update(self, state, replies):
        for reply in replies:
            reply.upload["delta"].div_(10)
        return super().server_update(state, replies)


class NoServerMomentumAtAll(FedMoS):
    def server_update(self, state, replies):
        still = state.replace(server_momentum=torch.zeros_like(state["server_momentum"]))
        return super().server_update(still, replies)


class OnlyTheLastClientAggregated(FedAvg):
    def server_update(self, state, replies):
        return state.replace(model=state["model"] + replies[-1].upload["delta"])


class PreviousModelOverwrittenTooEarly(ScaffoldMVR):
    def server_update(self, state, replies):
        following = super().server_update(state, replies)
        return following.replace(previous_model=following["model"])


class NormOfEachPartByItself(PAdaMFed):
    def move(self, y, u):
        y.sub_(u.sign(), alpha=self.client_learning_rate)


class NormSquared(PAdaMFed):
    def move(self, y, u):
        y.sub_(u / u.square().sum().clamp(min=1e-12), alpha=self.client_learning_rate)


class MomentumTakesTheNewControlVariate(PAdaMFed):
    def server_update(self, state, replies):
        following = super().server_update(state, replies)
        moved = following["control_variate"] - state["control_variate"]
        g = following["server_momentum"] + self.derived("momentum") * moved
        return following.replace(server_momentum=g)


class MessageHoldsOnlyTheLastTensor(FedAvgWithMomentum):
    def broadcast(self, state):
        g = state["server_momentum"].clone()
        g[:-1] = 0
        return {"model": state["model"], "server_momentum": g}


class AggregationNeverCalled(FedAvgWithMomentum):
    def server_update(self, state, replies):
        following = super().server_update(state, replies)
        return following.replace(server_momentum=state["server_momentum"])


class MomentumDividedByTheMeanNumberOfSteps(FedAvgWithMomentum):
    def server_update(self, state, replies):
        following = super().server_update(state, replies)
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        steps = max(state.plan.local_steps.values())
        g = -delta / (self.client_learning_rate * steps)
        return following.replace(server_momentum=g)


class PullByTheUnsquaredNorm(FedProx):
    def client_update(self, received, client_state, objective):
        x = received["model"]
        y = x.clone()
        for batch in objective.batches():
            away = y - x
            pull = self.proximal_strength * away / away.norm().clamp(min=1e-12)
            y = y - self.client_learning_rate * (objective.gradient(y, batch) + pull)
        return {"delta": y - x}, {}


class PushedAwayFromTheServersModel(FedProx):
    def client_update(self, received, client_state, objective):
        x, mu = received["model"], self.proximal_strength
        y = x.clone()
        for batch in objective.batches():
            gradient = objective.gradient(y, batch) - mu * (y - x)
            y = y - self.client_learning_rate * gradient
        return {"delta": y - x}, {}


class BiasCorrectionWhoseFirstStepCountsAsTheSecond(FedAdam):
    def server_update(self, state, replies):
        following = super().server_update(state, replies)
        factor = (1 - self.second_decay**2) ** 0.5 / (1 - self.first_decay**2)
        step = following["model"] - state["model"]
        return following.replace(model=state["model"] + factor * step)


class MovementOfTheWrongSign(FedAvgM):
    def client_update(self, received, client_state, objective):
        upload, state = super().client_update(received, client_state, objective)
        return {"delta": -upload["delta"]}, state


class ExtrapolationHalvedTwice(FedExP):
    def server_update(self, state, replies):
        halves = [replace(r, upload={"delta": r.upload["delta"] / 2**0.5}) for r in replies]
        return super().server_update(state, halves)


class DualOfEveryReplyAlike(FedDyn):
    def server_update(self, state, replies):
        alike = [replace(r, importance=1 / len(replies)) for r in replies]
        return super().server_update(state, alike)


class DualFollowedTheOtherWay(FedDyn):
    def client_changes(self, state, reply):
        return {"local_dual": -super().client_changes(state, reply)["local_dual"]}


class StepsFollowedWithoutTheirCorrection(FANT):
    def client_changes(self, state, reply):
        without = state.replace(control_variate=0 * state["control_variate"])
        return super().client_changes(without, reply)

    def server_update(self, state, replies):
        return FANT(**self.model_dump()).server_update(state, replies)


class PolyakStepOfTheGradientsNorm(FedSPS):
    def client_update(self, received, client_state, objective):
        y = received["model"].clone()
        for batch in objective.batches():
            q = objective.gradient(y, batch)
            eta = objective.last_loss / (self.polyak_divisor * q.norm().clamp(min=1e-30))
            y = y - q * eta.clamp(max=self.largest_learning_rate)
        return {"delta": y - received["model"]}, {}


class StepThatForgetsHowItGrew(DeltaSGD):
    growth: float = 0.0


class MomentumOfTheMovement(MimeLite):
    def server_update(self, state, replies):
        moved = [replace(r, upload={**r.upload, "gradient": r.upload["delta"]}) for r in replies]
        return super().server_update(state, moved)


class OneLocalEpochIsOneBatch(FedAvg):
    def client_update(self, received, client_state, objective):
        x = received["model"]
        batch = next(iter(objective.batches()))
        return {"delta": -self.client_learning_rate * objective.gradient(x, batch)}, {}


class ClientStateLostOnRestart(Scaffold):
    def client_update(self, received, client_state, objective):
        upload, _ = super().client_update(received, client_state, objective)
        return upload, {"control_variate": torch.zeros_like(received["model"])}


class StateChangedInPlace(PAdaMFed):
    def client_update(self, received, client_state, objective):
        upload, state = super().client_update(received, client_state, objective)
        client_state["control_variate"].copy_(state["control_variate"])
        return upload, client_state


class ServerRateForgotten(FedAvg):
    server_learning_rate: float = 1.0

    def server_update(self, state, replies):
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        return state.replace(model=state["model"] + delta)


class FullLengthOfUnequalSteps(PAdaMFed):
    def server_update(self, state, replies):
        following = super().server_update(state, replies)
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        return following.replace(model=state["model"] + self.server_learning_rate * delta)


class UndeclaredUpload(FedAvg):
    extra: ClassVar[str] = "loss_gradient"

    def client_update(self, received, client_state, objective):
        upload, state = super().client_update(received, client_state, objective)
        return {**upload, self.extra: upload["delta"]}, state


class CorrectionOfTheWrongSignBeforeTheMoments(FAdamGC):
    def client_update(self, received, client_state, objective):
        mirrored = 2 * client_state["control_variate"] - received["control_variate"]
        received = {**received, "control_variate": mirrored}
        return super().client_update(received, client_state, objective)


class CorrectionLeftOut(FANT):
    def client_update(self, received, client_state, objective):
        received = {**received, "control_variate": client_state["control_variate"]}
        return super().client_update(received, client_state, objective)


class SecondMomentForgottenBetweenRounds(LocalAdam):
    def client_update(self, received, client_state, objective):
        upload, state = super().client_update(received, client_state, objective)
        return upload, {"second_moment": torch.zeros_like(state["second_moment"])}


class EveryClientTracked(FAdamGC):
    def for_client(self, rank):
        return self


class LargestSecondMomentForgotten(FedAMS):
    def server_update(self, state, replies):
        nothing = torch.zeros_like(state["model"])
        return super().server_update(state.replace(largest_second_moment=nothing), replies)


class FirstMomentForgotten(FedAdam):
    def server_update(self, state, replies):
        nothing = torch.zeros_like(state["model"])
        return super().server_update(state.replace(first_moment=nothing), replies)


class PullTimesTheLearningRate(FedMoS):
    def client_update(self, received, client_state, objective):
        weaker = self.client_learning_rate * self.proximal_strength
        rule = self.model_copy(update={"proximal_strength": weaker})
        return FedMoS.client_update(rule, received, client_state, objective)


class ServersOwnStepLeftOut(STEM):
    def server_update(self, state, replies):
        following = super().server_update(state, replies)
        u = following["server_momentum"]
        return following.replace(model=following["model"].add(u, alpha=self.client_learning_rate))


class RoundThatForgetsTheModelBefore(STEM):
    def client_update(self, received, client_state, objective):
        x, u, eta = received["model"], received["direction"], self.client_learning_rate
        y, following = x, x
        for batch in objective.batches():
            y_prev, y = y, following
            u = (1 - self.local_momentum) * (u - objective.gradient(y_prev, batch))
            u = u + objective.gradient(y, batch)
            following = y - eta * u
        return {"delta": y - x, "direction": u}, {}


class TenTimesTheTheoremsStep(PAdaMFed):
    def theorem(self, samples, horizon):
        path, gamma, beta = super().theorem(samples, horizon)
        return 10 * path, gamma, beta


class MomentumStartedAtZero(PAdaMFed):
    def server_start(self, state, replies):
        following = super().server_start(state, replies)
        return following.replace(server_momentum=torch.zeros_like(following["model"]))


class RampThatNeverEnds(AutoFed):
    least_slope: float = -1e9


class DirectionsNeverCut(AutoFed):
    def at_round(self, state, number):
        return super().at_round(state.replace(norm_floor=torch.zeros(1)), number)


class DistanceFromTheLastModel(PAdaMFedDoG):
    def server_update(self, state, replies):
        return super().server_update(state.replace(initial_model=state["model"]), replies)


class StepsThatDoNotShrinkToTheEnd(PAdaMFedDoG):
    def _movement(self, state, number):
        return super()._movement(state, min(number, 1))


class NumberOfExamplesIgnored(FedAvg):
    def server_update(self, state, replies):
        delta = weighted_sum([(1 / len(replies), r.upload["delta"]) for r in replies])
        return state.replace(model=state["model"].add(delta, alpha=self.server_learning_rate))


class LearningRateIgnored(FedAvg):
    def client_update(self, received, client_state, objective):
        fixed = self.model_copy(update={"client_learning_rate": 0.05})
        return FedAvg.client_update(fixed, received, client_state, objective)


class TenthOfTheMovement(FedAvg):
    def client_update(self, received, client_state, objective):
        upload, state = super().client_update(received, client_state, objective)
        return {"delta": upload["delta"] / 10}, state


class OldGradientUncorrected(FedMoS):
    """u ← ∇F(y) + (1−a)u: the minibatch is not taken at the point before."""

    def client_update(self, received, client_state, objective):
        x, d, y = received["model"], None, received["model"]
        for batch in objective.batches():
            gradient = objective.gradient(y, batch).clone()
            d = gradient if d is None else gradient + (1 - self.local_momentum) * d
            y = y - self.client_learning_rate * d - self.proximal_strength * (y - x)
        return {"delta": y - x}, {}


# mutant -> a check that must catch it
MUTANTS = {
    ExtrapolationHalvedTwice: "the server's step is the disagreement of movements",
    DualOfEveryReplyAlike: "h is Σ p_i h_i whoever takes part",
    DualFollowedTheOtherWay: "what a server must know of its clients follows from their replies",
    StepsFollowedWithoutTheirCorrection: (
        "what a server must know of its clients follows from their replies"
    ),
    PolyakStepOfTheGradientsNorm: "clients step by what the loss allows",
    StepThatForgetsHowItGrew: "clients step by how fast their gradient changes",
    MomentumOfTheMovement: "momentum follows the gradients at the server's model",
    ControlVariateOfTheWrongSign: "unlike clients reach the minimiser of their mean",
    ControlVariateStartedAsTheModel: "control variates start at gradients",
    ControlVariateStartedAtRandom: "control variates start at gradients",
    ControlVariateSentInsteadOfItsChange: "c is Σ p_i c_i whoever takes part",
    OneOverEpochsInsteadOfOneOverStepsAndRate: "control variates are gradients for any K and η",
    LearningRateOfAnotherStepUnderASchedule: "control variates are gradients for any K and η",
    SamplesTimesEpochsTakenForSteps: "server momentum finds the gradient",
    ChangesAddedWithoutSOverN: "c is Σ p_i c_i whoever takes part",
    DividedByThePlannedNumberAfterDropOuts: "drop-outs do not shorten a round",
    NumberOfClientsTakenAsThoseConnected: "c is Σ p_i c_i whoever takes part",
    RepliesConsumedTwice: "c is Σ p_i c_i whoever takes part",
    PreviousBatchSubtracted: "a minibatch's noise cancels between two points",
    ServerDividesByEpochs: "accumulated momentum moves 1/(1 − β) as far",
    NoServerMomentumAtAll: "accumulated momentum moves 1/(1 − β) as far",
    OnlyTheLastClientAggregated: "every reply counts",
    PreviousModelOverwrittenTooEarly: "one full-batch step of everyone is gradient descent",
    NormOfEachPartByItself: "local steps have length η at most",
    NormSquared: "the scale of the loss is not seen",
    MomentumTakesTheNewControlVariate: "the printed momentum takes the old c",
    MessageHoldsOnlyTheLastTensor: "server momentum finds the gradient",
    AggregationNeverCalled: "server momentum finds the gradient",
    MomentumDividedByTheMeanNumberOfSteps: "server momentum finds the gradient",
    PullByTheUnsquaredNorm: "the pull to the server's model is μ(y − x)",
    PushedAwayFromTheServersModel: "the pull to the server's model is μ(y − x)",
    BiasCorrectionWhoseFirstStepCountsAsTheSecond: "two steps of the server's moments",
    MovementOfTheWrongSign: "the first round descends",
    OneLocalEpochIsOneBatch: "every minibatch counts",
    ClientStateLostOnRestart: "c is Σ p_i c_i whoever takes part",
    StateChangedInPlace: "leaves its inputs alone",
    ServerRateForgotten: "η_g multiplies the movement",
    FullLengthOfUnequalSteps: "unequal local steps have their right weights",
    UndeclaredUpload: "sends and keeps what it declares",
    CorrectionOfTheWrongSignBeforeTheMoments: "three rounds of the clients' moments",
    CorrectionLeftOut: "three rounds of the clients' moments",
    SecondMomentForgottenBetweenRounds: "three rounds of the clients' moments",
    EveryClientTracked: "only tracked clients renew c_i",
    LargestSecondMomentForgotten: "two steps of the server's moments",
    FirstMomentForgotten: "two steps of the server's moments",
    PullTimesTheLearningRate: "the pull to the server's model is μ(y − x)",
    ServersOwnStepLeftOut: "a linear loss moves the model by its steps",
    RoundThatForgetsTheModelBefore: "momentum on both sides",
    TenTimesTheTheoremsStep: "step sizes are the theorem's",
    MomentumStartedAtZero: "momentum starts at c",
    RampThatNeverEnds: "a range test finds the length of rounds",
    DirectionsNeverCut: "a range test finds the length of rounds",
    DistanceFromTheLastModel: "steps are distance over gradients",
    StepsThatDoNotShrinkToTheEnd: "steps are distance over gradients",
    NumberOfExamplesIgnored: "a reply counts by its weight",
    LearningRateIgnored: "η changes the movement",
    TenthOfTheMovement: "a linear loss moves the model by its steps",
    OldGradientUncorrected: "full batches hide the local momentum",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_fault_is_caught(mutant: Any) -> None:
    assert MUTANTS[mutant] in failed(mutant)


def test_a_rule_of_your_own_says_what_it_reduces_to() -> None:
    class Damped(FedAvg):
        name = "damped"
        reduces_to = ({"damping": 0.0}, "fedavg", {})
        damping: float = 0.5

        def server_update(self, state, replies):
            following = super().server_update(state, replies)
            step = (following["model"] - state["model"]) / (1 + self.damping)
            return following.replace(model=state["model"] + step)

    class Wrong(Damped):
        name = "wrong"
        reduces_to = ({"damping": 0.1}, "fedavg", {})

    class Unknown(Damped):
        name = "unknown"
        reduces_to = ({"damping": 0.0}, "fedavvg", {})

    class Silent(Wrong):
        name = "silent"
        reduces_to = None

    assert failed(Damped) == []
    assert failed(Silent) == []
    assert failed(Wrong) == failed(Unknown) == ["reduces to a simpler rule"]
    notes = {outcome.check: outcome.note for outcome in verify_rule(Unknown)}
    assert "no rule is named 'fedavvg'" in notes["reduces to a simpler rule"]


def test_the_built_in_rules_declare_their_own_reductions() -> None:
    declared = {name for name, rule in ALGORITHMS.items() if "reduces_to" in vars(rule)}
    assert declared == {
        *("fedprox", "fedavgm", "fedavg_m", "fedavg_m_vr", "scaffold_m", "scaffold_m_vr"),
        *("padamfed", "padamfed_vr", "padamfed_dog", "fedmos", "fednova", "mimelite"),
    }
    # a rule that inherits a reduction would claim it too
    inherited = {name for name, rule in ALGORITHMS.items() if rule.reduces_to} - declared
    assert inherited == set()


def test_every_check_catches_a_mutant_or_is_named_here() -> None:
    """A check that nothing can fail would be worth nothing."""
    checks = {outcome.check for outcome in verify_rule(FedAvg)}
    caught = {check for mutant in MUTANTS for check in failed(mutant)}
    assert checks - caught == set()
