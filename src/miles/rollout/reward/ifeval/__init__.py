"""IFEval and IFBench instruction checks: functions of a response and an instruction's arguments (layer 2).

Imports: rollout.reward.types, langdetect, syllapy, stdlib. Every check runs in about linear time in the response.
"""
